#!/usr/bin/env bash
# A worker written from the text of the contract alone: none of our additions, in bash and curl.
#
#   contract_worker.sh URL STREAMS REDIS_HOST REDIS_PORT REDIS_GROUP KEY_PREFIX
#
# The payload is {"do": "ok"}, {"do": "slow"} or {"do": "fail", "retryable": true}. Every answer of the
# plane goes to standard output as "VERB JSON".
set -u
url=$1 streams=$2 redis_host=$3 redis_port=$4 group=$5 prefix=$6
worker="contract-bash-$$"

post() { # post VERB BODY
  local answer
  answer=$(curl --silent --fail --max-time 60 --header 'Content-Type: application/json' \
    --data-binary "$2" "$url/internal/worker/$1") || { sleep 1; return 1; }
  printf '%s %s\n' "$1" "$answer"
}
text() { sed -n "s/.*\"$2\":\"\([^\"]*\)\".*/\1/p" <<<"$1"; }
number() { sed -n "s/.*\"$2\":\([0-9.]*\).*/\1/p" <<<"$1"; }

acknowledge() { # acknowledge ANSWER STREAM MESSAGE: as the answer says
  [[ $1 == *'"ack":true'* ]] || return
  exec 3<>"/dev/tcp/$redis_host/$redis_port"
  printf 'XACK %s%s %s %s\r\n' "$prefix" "$2" "$group" "$3" >&3
  read -r -t 5 reply <&3
  exec 3>&-
  printf 'ack {"message_id":"%s","reply":"%s"}\n' "$3" "${reply//$'\r'/}"
}

while true; do
  claimed=$(post claim "{\"worker_id\":\"$worker\",\"streams\":[\"${streams//,/\",\"}\"],\"max_wait_ms\":5000}")
  [[ $claimed == *'"claimed":true'* ]] || continue
  echo "$claimed"
  flat=${claimed// /}
  job=$(text "$claimed" job_id) token=$(text "$claimed" lease_token)
  stream=$(text "$claimed" name) message=$(text "$claimed" message_id)
  who="\"worker_id\":\"$worker\",\"job_id\":\"$job\",\"lease_token\":\"$token\""
  held="$who,\"attempt_id\":\"$(text "$claimed" attempt_id)\",\"stream\":\"$stream\",\"message_id\":\"$message\""
  if [[ $flat == *'"do":"slow"'* ]]; then
    for _ in 1 2 3 4; do
      sleep "$(number "$claimed" heartbeat_interval_seconds)"
      post heartbeat "{$who}"
    done
  fi
  if [[ $flat == *'"do":"fail"'* ]]; then
    retryable=$([[ $flat == *'"retryable":true'* ]] && echo true || echo false)
    error="{\"code\":\"E_BASH\",\"message\":\"it broke\",\"stack\":\"line 1\",\"retryable\":$retryable}"
    answer=$(post fail "{$held,\"error\":$error}")
  else
    result='{"artifacts":["s3://bucket/a"],"timings":{"run_ms":1},"outputs":{"by":"bash"}}'
    answer=$(post complete "{$held,\"result\":$result}")
  fi
  echo "$answer"
  acknowledge "$answer" "$stream" "$message"
done
