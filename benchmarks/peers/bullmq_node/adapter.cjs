// The producer side: the same JSON lines as bench_kit.py, answered by BullMQ.
const readline = require('node:readline');
const { Queue } = require('bullmq');

const connection = { host: '127.0.0.1', port: Number(process.env.BENCH_REDIS_PORT), maxRetriesPerRequest: null };
const queue = new Queue('bench', { connection });
const IN_FLIGHT = 50;
const CHUNK = 1000;

async function oneByOne(task, numbers) {
  for (let next = numbers.next(); !next.done; next = numbers.next()) {
    await queue.add(task, { argument: next.value });
  }
}

async function enqueue({ task, count, mode }) {
  const began = process.hrtime.bigint();
  const cpu = process.cpuUsage();
  const numbers = Array(count).keys();
  if (mode === 'single') await oneByOne(task, numbers);
  else if (mode === 'concurrent') {
    await Promise.all(Array.from({ length: IN_FLIGHT }, () => oneByOne(task, numbers)));
  } else {
    for (let start = 0; start < count; start += CHUNK) {
      const length = Math.min(CHUNK, count - start);
      await queue.addBulk(
        Array.from({ length }, (_, n) => ({ name: task, data: { argument: start + n } })),
      );
    }
  }
  const used = process.cpuUsage(cpu);
  return {
    seconds: Number(process.hrtime.bigint() - began) / 1e9,
    cpu_seconds: (used.user + used.system) / 1e6,
  };
}

async function pace({ rate, seconds }) {
  const count = Math.floor(rate * seconds);
  const began = Date.now();
  for (let n = 0; n < count; n += 1) {
    const ahead = began + (n * 1000) / rate - Date.now();
    if (ahead > 0) await new Promise((done) => setTimeout(done, ahead));
    await queue.add('stamp', { argument: process.hrtime.bigint().toString() });
  }
  return { count, seconds: (Date.now() - began) / 1000 };
}

const acts = {
  prepare: async () => ({
    versions: { bullmq: require('bullmq/package.json').version, node: process.version },
    notes: 'completed jobs kept (default), events stream, fetchNext',
    modes: ['single', 'concurrent', 'bulk'],
    worker: ['node', 'worker.cjs'],
  }),
  enqueue,
  pace,
  unfinished: async () => {
    const counts = await queue.getJobCounts('wait', 'active', 'delayed', 'prioritized');
    return { unfinished: Object.values(counts).reduce((sum, n) => sum + n, 0) };
  },
};

readline.createInterface({ input: process.stdin }).on('line', async (line) => {
  const { op, ...request } = JSON.parse(line);
  if (op === 'stop') {
    process.stdout.write('{"ok": true}\n');
    process.exit(0);
  }
  let answer;
  try {
    answer = { ok: true, ...(await acts[op](request)) };
  } catch (error) {
    answer = { ok: false, error: `${error.name}: ${error.message}` };
  }
  process.stdout.write(JSON.stringify(answer) + '\n');
});
