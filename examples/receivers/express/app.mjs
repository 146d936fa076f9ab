// A webhook receiver with Express: npm install, then
//   WEBHOOK_SECRETS=whsec_... PORT=9000 node app.mjs
// Two secrets, separated by a comma, while one replaces the other.

import express from "express";
import { InvalidWebhook, MemoryNonces, verify } from "./verify.mjs";

const secrets = (process.env.WEBHOOK_SECRETS ?? "").split(",").filter(Boolean);
if (secrets.length === 0) throw new Error("set WEBHOOK_SECRETS");
const nonces = new MemoryNonces();
// In a real receiver a table with event_id as its key, written in one transaction with the effect.
const lastSeq = new Map();
const done = new Set();

const app = express();

app.post("/hooks", express.raw({ type: () => true, limit: "1mb" }), async (request, response) => {
  let event;
  try {
    event = await verify(request.body, request.headers, secrets, nonces);
  } catch (error) {
    if (!(error instanceof InvalidWebhook)) throw error;
    console.log(JSON.stringify({ refused: error.reason }));
    return response.sendStatus(401); // it is tried again, signed anew
  }
  if (!done.has(event.event_id)) {
    done.add(event.event_id);
    // Events come in order; after a redelivery by hand an older one may follow a newer one.
    if ((event.seq ?? 0) > (lastSeq.get(event.job_id) ?? 0)) lastSeq.set(event.job_id, event.seq);
    console.log(JSON.stringify({ job: event.job_id, status: event.status, seq: event.seq }));
  }
  return response.sendStatus(204); // also for a repetition: it has been dealt with
});

const server = app.listen(Number(process.env.PORT ?? 9000), "127.0.0.1", () => {
  console.log(JSON.stringify({ listening: server.address().port }));
});
