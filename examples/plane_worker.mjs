// A worker of the control plane in Node.js, without a package. It needs no port of its own.
//
//   node examples/plane_worker.mjs http://127.0.0.1:8470 jobs
//
// TENURE_KEY holds the key where one is needed.
import { randomUUID } from "node:crypto";
import { hostname } from "node:os";

const [url, streams] = process.argv.slice(2);
const workerId = `node-${hostname()}-${process.pid}`;
const key = process.env.TENURE_KEY ? { "x-api-key": process.env.TENURE_KEY } : {};
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

const tasks = {
  greet: async ({ name }) => ({ greeting: `Hello, ${name}!` }),
  fail: async () => {
    throw new Error("it broke");
  },
};

/** One call of the plane; asked again until it answers, which is harmless for every verb. */
async function call(verb, body) {
  for (;;) {
    try {
      const answer = await fetch(`${url}/internal/worker/${verb}`, {
        method: "POST",
        headers: { "content-type": "application/json", ...key },
        body: JSON.stringify({ worker_id: workerId, ...body }),
        signal: AbortSignal.timeout(60_000),
      });
      if (answer.ok) return await answer.json();
      console.error(verb, answer.status, (await answer.json()).detail);
    } catch (error) {
      console.error(verb, error.message);
    }
    await pause(500 + 1500 * Math.random());
  }
}

async function work({ job_id, attempt_id, lease_token, stream, task, payload, ...lease }) {
  const held = { job_id, attempt_id, lease_token, stream };
  const beat = setInterval(async () => {
    if (!(await call("heartbeat", { job_id, lease_token })).ok) console.error("lost", job_id);
  }, lease.heartbeat_interval_seconds * 1000);
  try {
    const result = await (tasks[task] ?? tasks.fail)(payload);
    console.log(JSON.stringify(await call("complete", { ...held, result })));
  } catch ({ name, message, stack }) {
    const error = { code: name, message, stack, retryable: true };
    console.log(JSON.stringify(await call("fail", { ...held, error })));
  } finally {
    clearInterval(beat);
  }
}

for (;;) {
  const asked = { streams: streams.split(","), max_wait_ms: 20_000, claim_id: randomUUID() };
  const answer = await call("claim", asked);
  if (answer.claimed) await work(answer);
}
