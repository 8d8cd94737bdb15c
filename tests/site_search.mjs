// Ask the site's own search worker: node site_search.mjs WORKER INDEX QUERY...
import { readFileSync } from "node:fs";

const [worker, index, ...queries] = process.argv.slice(2);
let handle, answer;
globalThis.self = globalThis;
globalThis.addEventListener = (_, listener) => { handle = listener; };
globalThis.postMessage = (message) => answer(message);
(0, eval)(readFileSync(worker, "utf8"));

const SETUP = 0, QUERY = 2;
const ask = (type, data) => new Promise((done) => { answer = done; handle({ data: { type, data } }); });
await ask(SETUP, { ...JSON.parse(readFileSync(index, "utf8")), options: { suggest: false } });
const found = {};
for (const query of queries) {
  const pages = (await ask(QUERY, query)).data.items;
  found[query] = pages.map((parts) => parts[0].location.replace(/#.*/, ""));
}
console.log(JSON.stringify(found));
