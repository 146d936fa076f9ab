// Is this delivery Tenure's, fresh, and seen for the first time? Needs nothing but Node.
//
// The signature is HMAC-SHA256 over `timestamp.nonce.raw_body`, in hexadecimal; while a secret is
// being rotated a second header holds that of the other secret. Give `verify` the body as it came
// over the wire: parsed and written again, it would not be the same bytes.

import { createHmac, timingSafeEqual } from "node:crypto";

const SKEW_S = 300;
// Twice the skew and a minute: a delivery stamped with the last permitted future would otherwise
// outlive its nonce and could be played again.
const KEEP_S = 2 * SKEW_S + 60;

export class InvalidWebhook extends Error {
  constructor(reason, message) {
    super(message);
    this.reason = reason;
  }
}

// For one process. Several need a memory they share: `SET nonce 1 NX EX 660` in Redis will do.
export class MemoryNonces {
  #until = new Map();

  async take(nonce, nowS, keepS) {
    for (const [old, until] of this.#until) {
      if (until > nowS) break;
      this.#until.delete(old);
    }
    if (this.#until.has(nonce)) return false;
    this.#until.set(nonce, nowS + keepS);
    return true;
  }
}

export async function verify(rawBody, headers, secrets, nonces, nowS = Date.now() / 1000) {
  const [signature, other, timestamp, nonce, eventId] =
    ["signature", "signature-other", "timestamp", "nonce", "event-id"]
      .map((name) => headers[`x-euterpe-${name}`] ?? "");
  if (!/^\d{1,12}$/.test(timestamp) || !/^[A-Za-z0-9_-]{22,64}$/.test(nonce) || !eventId) {
    throw new InvalidWebhook("headers", "a header is missing or malformed");
  }
  if (Math.abs(nowS - Number(timestamp)) > SKEW_S) {
    throw new InvalidWebhook("timestamp", "the timestamp is too far away");
  }
  if (!isSigned([signature, other], secrets, `${timestamp}.${nonce}.`, rawBody)) {
    throw new InvalidWebhook("signature", "no signature fits");
  }
  const event = parsed(rawBody);
  // The header is not part of what is signed, the body is.
  if (event?.event_id !== eventId) {
    throw new InvalidWebhook("event_id", "header and body name different events");
  }
  // Last, so that only who knows the secret can fill the memory.
  if (!(await nonces.take(nonce, nowS, KEEP_S))) {
    throw new InvalidWebhook("replay", "this nonce was seen before");
  }
  return event;
}

// Every signature against every live secret, without an early way out.
function isSigned(given, secrets, prefix, rawBody) {
  let fits = false;
  for (const secret of secrets) {
    const expected = createHmac("sha256", keyOf(secret)).update(prefix).update(rawBody).digest();
    for (const one of given) {
      const offered = Buffer.from(one, "hex");
      if (offered.length === expected.length && timingSafeEqual(offered, expected)) fits = true;
    }
  }
  return fits;
}

function keyOf(secret) {
  return secret.startsWith("whsec_") ? Buffer.from(secret.slice(6), "base64") : Buffer.from(secret);
}

function parsed(rawBody) {
  try {
    return JSON.parse(rawBody.toString("utf8"));
  } catch {
    return undefined;
  }
}
