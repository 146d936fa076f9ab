// bull-board on the queues named in the arguments: node board.cjs <redis port> <queue> ...
// Prints the port it listens on.
const Module = require('node:module');
// bull-board asks for `bullmq`; here it is installed twice, under other names.
const resolve = Module._resolveFilename;
Module._resolveFilename = (name, ...rest) => resolve(name === 'bullmq' ? 'bullmq6' : name, ...rest);

const express = require('express');
const { createBullBoard } = require('@bull-board/api');
const { BullMQAdapter } = require('@bull-board/api/bullMQAdapter');
const { ExpressAdapter } = require('@bull-board/express');
const { Queue } = require('bullmq6');

const [, , port, ...names] = process.argv;
const connection = { host: '127.0.0.1', port: Number(port), maxRetriesPerRequest: null };
const serverAdapter = new ExpressAdapter();
serverAdapter.setBasePath('/');
createBullBoard({
  queues: names.map((name) => new BullMQAdapter(new Queue(name, { connection }))),
  serverAdapter,
});
const app = express();
app.use('/', serverAdapter.getRouter());
const server = app.listen(0, '127.0.0.1', () => process.stdout.write(`${server.address().port}\n`));
