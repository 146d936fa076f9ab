// Adds sample jobs with Node's own BullMQ and listens for their results: `REDIS_URL=... node main.mjs QUEUE`.
// The worker is Tenure's, in Python.

import { randomUUID } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import { Queue, QueueEvents } from 'bullmq';

const name = process.argv[2];
const connection = { url: process.env.REDIS_URL, maxRetriesPerRequest: null };
const queue = new Queue(name, { connection });
const events = new QueueEvents(name, { connection });
const WAITING_MAX = 30;
const between = (low, high) => low + Math.floor(Math.random() * (high - low + 1));

// ioredis reconnects to a lost store by itself; we log it once.
let unreachable = false;
const onError = (error) => {
  if (!unreachable) console.log(`Node waits for the store: ${error.code || error.message}`);
  unreachable = true;
};
queue.on('error', onError);
events.on('error', onError);

for (const end of ['completed', 'failed']) {
  events.once(end, ({ jobId }) => console.log(`Node hears: job ${jobId} ${end}, by a Python worker`));
}

function video() {
  const draw = Math.random();
  const scenes = Array.from({ length: between(1, 4) }, (_, index) => ({
    sceneNumber: index + 1,
    duration: between(1, 4),
    voiceover: 'Work is never owned, only leased.',
    imagePrompt: 'A house with a sign: to let',
  }));
  return {
    videoId: randomUUID(),
    userId: 'sample-node',
    script: { title: 'A sample', scenes },
    sample: { fail: draw < 0.04 ? 9 : draw < 0.16 ? 1 : 0 },
  };
}

for (let number = 0; ; number += 1) {
  const { waiting, prioritized } = await queue.getJobCounts('waiting', 'prioritized');
  unreachable = false;
  if (waiting + prioritized < WAITING_MAX) {
    await queue.add(name, video(), {
      attempts: 3,
      backoff: { type: 'exponential', delay: 500 },
      removeOnComplete: { count: 1000 },
      removeOnFail: { count: 1000 },
      ...(number % 5 === 4 ? { priority: 1 } : {}),
    });
  }
  await sleep(between(500, 1500));
}
