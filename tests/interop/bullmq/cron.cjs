// Says when a pattern comes next, by the cron-parser of one BullMQ: node cron.cjs <package> < [[pattern, ms, options]]
// The answers are milliseconds, or null where the package finds none or refuses the pattern.
const { createRequire } = require('node:module');
const own = createRequire(require.resolve(`${process.argv[2]}/package.json`));
const parser = own('cron-parser');
const parse = parser.parseExpression || ((text, options) => parser.CronExpressionParser.parse(text, options));
const asked = JSON.parse(require('node:fs').readFileSync(0, 'utf8'));
const answers = asked.map(([text, ms, options]) => {
  try {
    return parse(text, { ...options, currentDate: new Date(ms) }).next().getTime();
  } catch (error) {
    return null;
  }
});
console.log(JSON.stringify(answers));
