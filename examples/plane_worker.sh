#!/usr/bin/env bash
# A worker of the control plane in bash and curl. It needs no port of its own.
#
#   examples/plane_worker.sh http://127.0.0.1:8470 jobs  jq '{greeting: ("Hello, " + .name)}'
#
# The command gets the job's payload on its standard input; what it prints is the result, in JSON.
# When it ends with an error, the job failed. TENURE_KEY holds the key where one is needed.
set -u
url=$1 streams=$2
shift 2
worker="bash-$(hostname)-$$"
error_log=$(mktemp)
trap 'rm -f "$error_log"; kill $(jobs -p) 2>/dev/null' EXIT

call() { # call VERB BODY: the answer, asked for again until the plane gives one
  until curl --silent --fail-with-body --max-time 60 "$url/internal/worker/$1" \
    ${TENURE_KEY:+--header "Authorization: Bearer $TENURE_KEY"} \
    --header 'Content-Type: application/json' --data-binary "$2"; do
    echo >&2
    sleep $((RANDOM % 3 + 1))
  done
}
text() { sed -n "s/.*\"$2\":\"\([^\"]*\)\".*/\1/p" <<<"$1"; }
quoted() { tr -d '\000-\037"\\' <"$1" | head -c 2000; }

keep() { # keep BODY SECONDS PID: heartbeats for as long as the command runs; ends it if lost
  while sleep "$2" && kill -0 "$3" 2>/dev/null; do
    [[ $(call heartbeat "$1") == *'"ok":true'* ]] || kill "$3"
  done
}

work() { # work CLAIMED COMMAND...
  local claimed=$1 payload held every result pid
  shift
  payload=$(sed 's/.*"payload":\(.*\),"lease_ttl_seconds".*/\1/' <<<"$claimed")
  every=$(sed 's/.*"heartbeat_interval_seconds":\([0-9.]*\).*/\1/' <<<"$claimed")
  held="\"worker_id\":\"$worker\",\"job_id\":\"$(text "$claimed" job_id)\""
  held+=",\"attempt_id\":\"$(text "$claimed" attempt_id)\""
  held+=",\"lease_token\":\"$(text "$claimed" lease_token)\""
  held+=",\"stream\":$(sed 's/.*"stream":\({[^}]*}\).*/\1/' <<<"$claimed")"
  result=$(mktemp)
  "$@" <<<"$payload" >"$result" 2>"$error_log" &
  pid=$!
  keep "{$held}" "$every" "$pid" &
  if wait "$pid"; then
    call complete "{$held,\"result\":$(cat "$result")}"
  else
    call fail "{$held,\"error\":{\"code\":\"exit_$?\",\"message\":\"$(quoted "$error_log")\"}}"
  fi
  echo
  rm -f "$result"
}

while true; do # the same claim_id until it was answered: a lost answer loses no job
  ask="{\"worker_id\":\"$worker\",\"streams\":[\"${streams//,/\",\"}\"],\"max_wait_ms\":20000"
  claimed=$(call claim "$ask,\"claim_id\":\"$RANDOM-$RANDOM-$SECONDS\"}")
  [[ $claimed == *'"claimed":true'* ]] && work "$claimed" "$@"
done
