// The worker: no-op, stamp and nap handlers that report as bench_kit's Probe does.
const fs = require('node:fs');
const { Worker } = require('bullmq');

const connection = { host: '127.0.0.1', port: Number(process.env.BENCH_REDIS_PORT), maxRetriesPerRequest: null };
const concurrency = Number(process.env.BENCH_CONCURRENCY || 50);
const path = process.env.BENCH_PROBE;
const expect = Number(process.env.BENCH_EXPECT || 0);
const cpuNs = () => { const used = process.cpuUsage(); return (used.user + used.system) * 1000; };
const nowNs = () => Number(process.hrtime.bigint());

let count = 0;
let first;
const waits = [];

function finish() {
  const told = { ...first, last_ns: nowNs(), cpu_last_ns: cpuNs(), count, pid: process.pid, waits_ns: waits };
  fs.writeFileSync(`${path}.draft`, JSON.stringify(told));
  fs.renameSync(`${path}.draft`, path);
}

async function handle(job) {
  if (job.name === 'nap') {
    const log = path.replace(/\.json$/, '.log');
    fs.appendFileSync(log, `begin ${job.data.argument} ${nowNs()} ${process.pid}\n`);
    await new Promise((done) => setTimeout(done, 50));
    fs.appendFileSync(log, `end ${job.data.argument} ${nowNs()} ${process.pid}\n`);
    return;
  }
  if (job.name === 'stamp') {
    if (String(job.data.argument) === '0') {
      fs.writeFileSync(path.replace(/\.json$/, '.ready'), '');
      return;
    }
    waits.push(nowNs() - Number(job.data.argument));
  }
  count += 1;
  if (count === 1) first = { first_ns: nowNs(), cpu_first_ns: cpuNs() };
  if (count === expect) finish();
}

new Worker('bench', handle, { connection, concurrency });
