// A webhook receiver written from the contract's text alone, with nothing but Node. It knows one
// secret and reads one signature. Each delivery is one line on standard output: what became of it,
// the event's id and its status.

import { createHmac, timingSafeEqual } from "node:crypto";
import { createServer } from "node:http";

const SKEW_S = 300;
const NONCE_S = 300;
const nonces = new Map();
const eventIds = new Set();

function judge(headers, body) {
  const [signature, timestamp, nonce, eventId] = ["signature", "timestamp", "nonce", "event-id"]
    .map((name) => headers[`x-euterpe-${name}`]);
  if (!signature || !timestamp || !nonce || !eventId) return "incomplete";
  const now = Date.now() / 1000;
  if (Math.abs(now - Number(timestamp)) > SKEW_S) return "skewed";
  const expected = createHmac("sha256", process.env.SECRET)
    .update(timestamp + "." + nonce + ".").update(body).digest();
  const given = Buffer.from(signature, "hex");
  if (signature.length !== 64 || !timingSafeEqual(given, expected)) return "forged";
  if ((nonces.get(nonce) ?? 0) > now) return "replayed";
  nonces.set(nonce, now + NONCE_S);
  if (eventIds.has(eventId)) return "duplicate";
  eventIds.add(eventId);
  return "accepted";
}

const server = createServer((request, response) => {
  const pieces = [];
  request.on("data", (piece) => pieces.push(piece));
  request.on("end", () => {
    const body = Buffer.concat(pieces);
    const verdict = judge(request.headers, body);
    const event = JSON.parse(body);
    console.log(JSON.stringify({ verdict, event_id: event.event_id, status: event.status }));
    response.writeHead(verdict === "accepted" || verdict === "duplicate" ? 200 : 401).end();
  });
});
server.listen(0, "127.0.0.1", () => {
  console.log(`listening on http://127.0.0.1:${server.address().port}`);
});
