// Drives a real BullMQ by JSON lines, so that a test can say in Python what Node shall do.
//
//   node driver.cjs <5|6> <redis port, socket, or cluster:port> [prefix]
//   -> {"no": 1, "do": "call", "on": "queue:mail", "method": "add", "args": ["welcome", {}, {}]}
//   <- {"no": 1, "ok": {...}}   or   {"no": 1, "error": "text", "name": "Error"}
//
// `on` names an object, made when first used: queue:NAME, worker:NAME (a worker without a processor,
// for manual steps), job:NAME:ID, flow, events:NAME. `do` is call, work, stop, seen, wait or close.
const readline = require('node:readline');
const [, , major, address, prefix = 'bull'] = process.argv;
const bullmq = require(`bullmq${major}`);
const IORedis = require('ioredis');

const where = /^\d+$/.test(address) ? { host: '127.0.0.1', port: Number(address) } : { path: address };
const connection = () =>
  address.startsWith('cluster:')
    ? new IORedis.Cluster([{ host: '127.0.0.1', port: Number(address.slice(8)) }], {
        redisOptions: { maxRetriesPerRequest: null },
      })
    : { ...where, maxRetriesPerRequest: null };
const made = new Map();
const working = new Map();
const seen = new Map();

function make(on) {
  const [kind, name, id] = on.split(/:(.*?)(?::(.*))?$/s);
  switch (kind) {
    case 'queue':
      return new bullmq.Queue(name, { connection: connection(), prefix });
    case 'worker':
      return new bullmq.Worker(name, null, {
        connection: connection(), prefix, autorun: false, lockDuration: 30000, ...(options.get(name) || {}),
      });
    case 'flow':
      return new bullmq.FlowProducer({ connection: connection(), prefix });
    case 'events':
      return new bullmq.QueueEvents(name, { connection: connection(), prefix, lastEventId: '0-0' });
    default:
      throw new Error(`no such object: ${on}`);
  }
}
const options = new Map();

async function object(on) {
  if (on.startsWith('job:')) {
    const [, name, id] = on.match(/^job:([^:]*):(.*)$/s);
    const queue = await object(`queue:${name}`);
    const job = held.get(`${name}:${id}`) || (await bullmq.Job.fromId(queue, id));
    if (!job) throw new Error(`no job ${id} in ${name}`);
    return job;
  }
  if (!made.has(on)) {
    const it = make(on);
    it.on?.('error', (error) => process.stderr.write(`${on}: ${error.message}\n`));
    made.set(on, it);
    await it.waitUntilReady?.();
  }
  return made.get(on);
}
// Jobs that a manual fetch returned: their token and options live in the object.
const held = new Map();

function plain(value) {
  if (value instanceof bullmq.Job) return { ...value.asJSON(), id: value.id, token: value.token, attemptsStarted: value.attemptsStarted, deferredFailure: value.deferredFailure };
  if (Array.isArray(value)) return value.map(plain);
  if (value && typeof value === 'object' && value.job instanceof bullmq.Job) {
    return { job: plain(value.job), children: plain(value.children || []) };
  }
  return value === undefined ? null : value;
}

// What a handler does is said in its job's data: {"do": "ok" | "fail" | "fatal" | "sleep", ...}.
async function handler(job, token) {
  const data = job.data || {};
  if (data.progress !== undefined) await job.updateProgress(data.progress);
  if (data.log) await job.log(data.log);
  if (data.ms) await new Promise((done) => setTimeout(done, data.ms));
  if (data.do === 'fatal') throw new bullmq.UnrecoverableError(data.why || 'fatal');
  if (data.do === 'fail' || (data.do === 'flaky' && job.attemptsMade < data.times)) {
    throw new Error(data.why || 'failed on purpose');
  }
  if (data.do === 'children') return await job.getChildrenValues();
  return data.result === undefined ? { ok: job.id } : data.result;
}

const acts = {
  async call({ on, method, args = [], worker_options: extra, queue }) {
    if (extra) options.set(queue, extra);
    const it = await object(on);
    if (method === 'moveToFailed' || method === 'fail') {
      const [why, token, unrecoverable] = args;
      const error = unrecoverable ? new bullmq.UnrecoverableError(why) : new Error(why);
      return plain(await it.moveToFailed(error, token, false));
    }
    if (method.startsWith('get:')) return plain(it[method.slice(4)]);
    const answer = await it[method](...args);
    if (on.startsWith('worker:') && answer instanceof bullmq.Job) {
      held.set(`${answer.queueName}:${answer.id}`, answer);
    }
    return plain(answer);
  },
  async work({ queue, as = 'w', options: extra = {} }) {
    const worker = new bullmq.Worker(queue, handler, { connection: connection(), prefix, ...extra });
    const log = [];
    worker.on('completed', (job) => log.push(['completed', job.id]));
    worker.on('failed', (job, error) => log.push(['failed', job?.id, error.message]));
    worker.on('error', (error) => log.push(['error', null, error.message]));
    await worker.waitUntilReady();
    working.set(as, { worker, log });
  },
  async stop({ as = 'w' }) {
    const { worker, log } = working.get(as);
    working.delete(as);
    await worker.close();
    return log;
  },
  async log({ as = 'w' }) {
    return working.get(as).log;
  },
  async follow({ queue }) {
    const events = await object(`events:${queue}`);
    const log = [];
    seen.set(queue, log);
    for (const name of ['added', 'waiting', 'active', 'progress', 'completed', 'failed', 'delayed', 'drained',
      'paused', 'resumed', 'removed', 'stalled', 'retries-exhausted', 'waiting-children', 'duplicated',
      'deduplicated', 'cleaned']) {
      events.on(name, (args, id) => log.push([name, args, id]));
    }
    events.on('error', (error) => log.push(['error', error.message]));
  },
  async seen({ queue }) {
    return seen.get(queue);
  },
  async until({ queue, id, ms = 5000 }) {
    const job = await object(`job:${queue}:${id}`);
    return job.waitUntilFinished(await object(`events:${queue}`), ms);
  },
  async close() {
    for (const { worker } of working.values()) await worker.close(true);
    for (const it of made.values()) await it.close();
  },
};

const lines = readline.createInterface({ input: process.stdin });
lines.on('line', async (line) => {
  const ask = JSON.parse(line);
  let answer;
  try {
    answer = { no: ask.no, ok: (await acts[ask.do](ask)) ?? null };
  } catch (error) {
    answer = { no: ask.no, error: error.message, name: error.name, code: error.code ?? null };
  }
  process.stdout.write(JSON.stringify(answer) + '\n');
  if (ask.do === 'close') process.exit(0);
});
lines.on('close', () => process.exit(0));
