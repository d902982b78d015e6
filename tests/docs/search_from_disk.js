// Runs the search of a built site as a page does that is opened from disk, in a frame: `node search_from_disk.js SITE
// WORD` prints the pages that are found. The document is as much of one as the frame and the search ask for.
"use strict";
const fs = require("fs"), path = require("path"), vm = require("vm"), { pathToFileURL, fileURLToPath } = require("url");

const [site, word] = process.argv.slice(2);
class ErrorEvent extends Event { constructor(type, all) { super(type); Object.assign(this, all); } }

function makeFrame() {
  const scripts = [], target = new EventTarget();
  const inside = { MessageEvent, URL, console, setTimeout, parent: outside };
  for (const name of ["addEventListener", "removeEventListener", "dispatchEvent"]) inside[name] = target[name].bind(target);
  inside.self = inside.window = inside;
  const append = (script) => {
    scripts.push(script);
    vm.runInContext(fs.readFileSync(fileURLToPath(script.src), "utf8"), inside, script.src);
    setTimeout(script.onload);
  };
  inside.document = { open() {}, write() {}, close() {}, createElement: () => ({}), body: { append }, querySelector: () => scripts[0] };
  vm.createContext(inside);
  return { contentWindow: inside, contentDocument: inside.document, remove() {} };
}

const page = pathToFileURL(path.join(site, "index.html")).href;
const outside = {
  EventTarget, MessageEvent, ErrorEvent, URL, Promise, console, setTimeout, location: new URL(page),
  document: { baseURI: page, createElement: makeFrame, body: { append() {} } },
};
outside.window = outside;
vm.createContext(outside);
vm.runInContext(fs.readFileSync(path.join(site, "javascripts", "iframe-worker.js"), "utf8"), outside);

const html = fs.readFileSync(path.join(site, "index.html"), "utf8");
const config = JSON.parse(/<script id="__config"[^>]*>(.*?)<\/script>/s.exec(html)[1]);
vm.runInContext(fs.readFileSync(path.join(site, "search", "search_index.js"), "utf8"), outside);
const worker = new outside.Worker(new URL(config.search, page).href);
worker.addEventListener("error", (event) => { console.error(event.message); process.exit(1); });
worker.addEventListener("message", ({ data }) => {
  if (data.type === 1) worker.postMessage({ type: 2, data: word });
  if (data.type === 3) console.log(data.data.items.flat().map((item) => item.location).join("\n"));
});
worker.postMessage({ type: 0, data: { ...vm.runInContext("__index", outside), options: { suggest: false } } });
