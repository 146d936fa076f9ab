// A worker written from the text of the contract alone: none of our additions, in Node.js.
//
//   node contract_worker.mjs URL STREAMS REDIS_HOST REDIS_PORT REDIS_GROUP KEY_PREFIX
//
// The payload is {"do": "ok"}, {"do": "slow"} or {"do": "fail", "retryable": true}. Every answer of the
// plane goes to standard output as "VERB JSON".
import { connect } from "node:net";

const [url, streams, redisHost, redisPort, group, prefix] = process.argv.slice(2);
const worker_id = `contract-node-${process.pid}`;
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const say = (verb, answer) => console.log(`${verb} ${JSON.stringify(answer)}`);

async function post(verb, body) {
  const answer = await fetch(`${url}/internal/worker/${verb}`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ worker_id, ...body }),
  });
  if (!answer.ok) throw new Error(`${verb}: ${answer.status} ${await answer.text()}`);
  return answer.json();
}

/** The worker's own acknowledgement of the stream message, where the plane says that it should. */
function acknowledge({ name, message_id }) {
  return new Promise((resolve, reject) => {
    const socket = connect(Number(redisPort), redisHost, () =>
      socket.write(`XACK ${prefix}${name} ${group} ${message_id}\r\n`),
    );
    socket.once("error", reject);
    socket.once("data", (data) => {
      socket.end();
      say("ack", { message_id, reply: data.toString().trim() });
      resolve();
    });
  });
}

async function work({ job_id, attempt_id, lease_token, stream, payload, ...lease }) {
  const held = { job_id, attempt_id, lease_token, stream: stream.name, message_id: stream.message_id };
  for (let beats = payload.do === "slow" ? 4 : 0; beats > 0; beats--) {
    await pause(lease.heartbeat_interval_seconds * 1000);
    say("heartbeat", await post("heartbeat", { job_id, lease_token }));
  }
  const failed = payload.do === "fail";
  const error = { code: "E_NODE", message: "it broke", stack: "line 1", retryable: payload.retryable };
  const result = { artifacts: ["s3://bucket/a"], timings: { run_ms: 1 }, outputs: { by: "node" } };
  const verb = failed ? "fail" : "complete";
  const answer = await post(verb, { ...held, ...(failed ? { error } : { result }) });
  say(verb, answer);
  if (answer.ack) await acknowledge(stream);
}

for (;;) {
  try {
    const claimed = await post("claim", { streams: streams.split(","), max_wait_ms: 5_000 });
    if (claimed.claimed) {
      say("claim", claimed);
      await work(claimed);
    }
  } catch (error) {
    console.error(error.message);
    await pause(1_000);
  }
}
