// Follows a job with the EventSource client of npm and prints one JSON line for each thing it sees.
//   node follow.mjs URL [API key]
// It never closes by itself: it ends when the server tells it not to come back (204).
import { EventSource } from "eventsource";

const [url, key] = process.argv.slice(2);
const say = (thing) => process.stdout.write(JSON.stringify(thing) + "\n");
const withKey = (input, init) =>
  fetch(input, { ...init, headers: { ...init.headers, Authorization: `Bearer ${key}` } });
const source = new EventSource(url, key ? { fetch: withKey } : {});

for (const type of ["hello", "queued", "running", "progress", "done", "error", "canceled", "expired"]) {
  source.addEventListener(type, (event) => {
    if (event.data !== undefined) {
      say({ type, id: event.lastEventId, data: JSON.parse(event.data) });
    }
  });
}
source.addEventListener("open", () => say({ type: "open" }));
source.addEventListener("error", (event) => {
  if (source.readyState === EventSource.CLOSED) {
    say({ type: "closed", code: event.code ?? 0 });
    process.exit(0);
  }
  say({ type: "reconnecting" });
});
