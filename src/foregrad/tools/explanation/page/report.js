"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const ops = data.ops, count = ops.name.length;
  const $ = (id) => document.getElementById(id);
  const esc = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
  const units = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
  const inBytes = (n) => { for (const [unit, size] of units) if (n >= size) return (n / size).toFixed(1) + " " + unit; return n + " B"; };
  const inFlops = (n) => { for (const [p, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) if (n >= size) return (n / size).toFixed(1) + " " + p + "FLOP"; return n + " FLOP"; };
  const inSeconds = (n) => n === null ? "" : n >= 1 ? n.toPrecision(3) + " s" : n >= 1e-3 ? (n * 1e3).toPrecision(3) + " ms" : (n * 1e6).toPrecision(3) + " us";
  const role = (i) => data.roles[ops.role[i]];
  const short = (path) => path.replace(/^self\.?/, "");
  const byKey = new Map();
  for (let i = 0; i < count; i++) byKey.set((ops.half[i] ? "b:" : "f:") + ops.name[i], i);
  const readers = Array.from({ length: count }, () => []);
  for (let i = 0; i < count; i++) for (const r of ops.reads[i]) readers[r].push(i);
  const savedTable = data.tables.find((t) => t.title === "Saved");
  const savedRow = new Map();
  if (savedTable) savedTable.ops.forEach((op, row) => savedRow.set(op, savedTable.rows[row]));

  // ------------------------------------------------------------------ selection, shared by all views
  const listeners = [];
  let selected = -1;
  function select(op, from) {
    selected = op;
    for (const tell of listeners) tell(op, from);
    detail(op);
  }
  function detail(op) {
    const box = $("detail");
    box.hidden = op < 0;
    if (op < 0) return;
    const row = savedRow.get(op), link = (i) => `<button class="link" type="button" data-go="${i}">${esc(ops.name[i])}</button>`;
    const list = (items) => items.slice(0, 6).map(link).join(" ") + (items.length > 6 ? ` and ${items.length - 6} more` : "");
    const facts = [`<b>${esc(ops.name[op])}</b>`, `<code>${esc(ops.op[op])}</code>`, `<code>${esc(ops.type[op])}</code>`,
      `<span>${ops.half[op] ? "backward" : "forward"}${role(op) === "saved" ? ", saved" : role(op) === "again" ? ", run twice" : ""}</span>`,
      inBytes(ops.bytes[op])];
    if (ops.flops[op]) facts.push(inFlops(ops.flops[op]));
    const module = data.modules[ops.module[op]];
    if (module[0]) facts.push(`<span>${esc(short(module[0]) || "self")} (${esc(module[1])})</span>`);
    if (ops.reads[op].length) facts.push(`<span>reads</span> ${list(ops.reads[op])}`);
    if (readers[op].length) facts.push(`<span>read by</span> ${list(readers[op])}`);
    const line = data.lines[ops.line[op]];
    box.innerHTML = `<div class="what">${facts.join(" ")}</div>` + (line ? `<code>${esc(line)}</code>` : "") +
      (row ? `<div><b>${esc(row[0])}</b>, kept because ${esc(row[2])}</div>` : "") +
      `<button class="close" type="button" aria-label="Close">×</button>`;
  }
  if ($("detail")) $("detail").addEventListener("click", (event) => {
    if (event.target.classList.contains("close")) select(-1, "detail");
    const go = event.target.dataset.go;
    if (go !== undefined) select(Number(go), "detail");
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") { select(-1, "keys"); tip(null); } });

  // ------------------------------------------------------------------ tooltip
  function tip(html, x, y) {
    const box = $("tip");
    box.hidden = !html;
    if (!html) return;
    box.innerHTML = html;
    const width = box.offsetWidth, height = box.offsetHeight;
    box.style.left = Math.max(8, Math.min(x + 14, innerWidth - width - 8)) + "px";
    box.style.top = (y + 18 + height > innerHeight ? y - height - 12 : y + 18) + "px";
  }
  function tipOf(op) {
    const row = savedRow.get(op), line = data.lines[ops.line[op]];
    const bytes = row && row[3] === "saved" ? row[1] : ops.bytes[op];
    return `<b>${esc((row && row[0]) || ops.name[op])}</b> ${inBytes(bytes)} ${esc(ops.type[op])}<br><code>${esc(ops.op[op])}</code>` +
      (line ? `<br>${esc(line)}` : "") + (row ? `<br>${esc(row[2])}` : "");
  }

  // ------------------------------------------------------------------ memory
  const svg = $("chart");
  if (svg) {
    const layers = [...svg.querySelectorAll(".layer")];
    for (const layer of layers) { const t = layer.querySelector("title"); if (t) { layer.setAttribute("aria-label", t.textContent); t.remove(); } }
    let near = -1;
    const opOf = (layer) => byKey.get(layer.dataset.key) ?? -1;
    svg.addEventListener("mousemove", (event) => {
      const layer = event.target.closest(".layer");
      tip(layer && opOf(layer) >= 0 ? tipOf(opOf(layer)) : null, event.clientX, event.clientY);
    });
    svg.addEventListener("mouseleave", () => tip(null));
    svg.addEventListener("click", (event) => { const layer = event.target.closest(".layer"); if (layer) select(opOf(layer), "memory"); });
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
      if (event.key === "Enter" && near >= 0) select(opOf(layers[near]), "memory");
      if (!step || !layers.length) return;
      event.preventDefault();
      if (near >= 0) layers[near].classList.remove("near");
      near = (near + step + layers.length) % layers.length;
      layers[near].classList.add("near");
      const box = layers[near].getBoundingClientRect();
      tip(tipOf(opOf(layers[near])), box.left + box.width / 2, box.top);
    });
    svg.addEventListener("blur", () => { tip(null); if (near >= 0) layers[near].classList.remove("near"); });
    listeners.push((op) => layers.forEach((layer) => layer.classList.toggle("on", op >= 0 && opOf(layer) === op)));
  }

  // ------------------------------------------------------------------ graph
  if (count) graph();
  function graph() {
    const MANY = 120, STRETCH = 50;
    const brief = (i) => ops.op[i].replace(/^aten\./, "").replace(/\.\w+$/, "");
    // The tree of modules: by their paths, in the order in which they run first.
    const root = { path: "", name: "", cls: "", children: [], own: [], parent: null, depth: 0, id: 0 };
    const nodes = [root], byPath = new Map([["", root]]);
    const modules = data.modules.map(([path, cls]) => ({ path: short(path), cls }));
    modules.map((m, i) => [m, i]).sort((a, b) => a[0].path.length - b[0].path.length).forEach(([m]) => {
      if (byPath.has(m.path)) return;
      let up = m.path, parent = root;
      while (up.includes(".")) { up = up.slice(0, up.lastIndexOf(".")); if (byPath.has(up)) { parent = byPath.get(up); break; } }
      const node = { path: m.path, name: parent.path ? m.path.slice(parent.path.length + 1) : m.path, cls: m.cls, children: [], own: [], parent, depth: parent.depth + 1, id: nodes.length };
      parent.children.push(node); nodes.push(node); byPath.set(m.path, node);
    });
    const home = Array.from({ length: count }, (_, i) => byPath.get(modules[ops.module[i]].path));
    const shown = (i) => !["input", "tangent"].includes(role(i));
    for (let i = 0; i < count; i++) if (shown(i)) home[i].own.push(i);
    for (const node of [...nodes]) if (!node.children.length && node.own.filter((i) => !ops.half[i] && role(i) !== "view").length > MANY) inStretches(node);
    // A long row of operators in no module further down is folded in stretches of it.
    function inStretches(node) {
      const of = new Map();
      let stretch = null, size = MANY;
      const add = (i) => { home[i] = stretch; stretch.own.push(i); };
      for (const i of node.own.filter((i) => !ops.half[i])) {
        if (size >= STRETCH) {
          stretch = { path: node.path, name: "", cls: "", children: [], own: [], parent: node, depth: node.depth + 1, id: nodes.length };
          node.children.push(stretch); nodes.push(stretch); size = 0;
        }
        add(i);
        if (role(i) !== "view") size++;
        if (ops.seq[i] >= 0) of.set(ops.seq[i], stretch);
      }
      for (const i of node.own.filter((i) => ops.half[i])) { stretch = of.get(ops.seq[i]) || stretch; add(i); }
      let done = 0;
      for (const s of node.children) {
        const own = s.own.filter((i) => !ops.half[i] && role(i) !== "view");
        s.name = `${done + 1} to ${done + own.length}`;
        s.cls = own.length ? `${brief(own[0])} to ${brief(own[own.length - 1])}` : "";
        done += own.length;
      }
      node.own = [];
    }
    // What a module and those in it hold.
    const sum = (node) => {
      const total = { f: 0, b: 0, flops: 0, saved: 0, again: 0, first: Infinity };
      const add = (i) => {
        if (!ops.half[i] && i < total.first) total.first = i;
        if (role(i) !== "view") total[ops.half[i] ? "b" : "f"]++;
        total.flops += ops.flops[i];
        if (role(i) === "again") total.again++;
        const row = savedRow.get(i);
        if (row && row[3] === "saved") total.saved += row[1];
      };
      node.own.forEach(add);
      for (const child of node.children) {
        const t = sum(child);
        for (const k of ["f", "b", "flops", "saved", "again"]) total[k] += t[k];
        total.first = Math.min(total.first, t.first);
      }
      return (node.total = total);
    };
    sum(root);
    for (const node of nodes) node.children = node.children.filter((c) => c.total.f + c.total.b > 0).sort((a, b) => a.total.first - b.total.first);
    const most = Math.max(1, ...nodes.filter((n) => n !== root).map((n) => n.total.saved), ...[...savedRow.values()].map((row) => row[3] === "saved" ? 4 * row[1] : 0));
    const open = new Set([0]);
    const boxesBelow = (limit) => {
      // Unfold level by level while what is to be seen stays few.
      let level = [root];
      for (;;) {
        const next = level.flatMap((n) => n.children);
        const boxes = [...open].length + next.length + level.reduce((n, m) => n + m.own.filter((i) => role(i) !== "view").length, 0);
        if (!next.length || boxes > limit) return;
        const wrappers = next.filter((n) => n.children.length);
        if (!wrappers.length || wrappers.flatMap((n) => n.children).length + boxes > limit) return;
        for (const n of wrappers) open.add(n.id);
        level = wrappers;
      }
    };
    if (root.total.f + root.total.b <= 160) nodes.forEach((n) => open.add(n.id)); else boxesBelow(90);

    const F = 28, GAP = 120, ROW = 20, LEAD = 28;
    let FW, B, BW, W;
    const fit = () => { W = Math.max(560, Math.min(1100, $("scene").clientWidth - 2)); FW = BW = Math.floor((W - 2 * F - GAP) / 2); B = F + FW + GAP; };
    fit();
    let withViews = false, rows = [], at = 0, wanted = "";
    const rep = new Int32Array(count);

    function layout() {
      rows = []; rep.fill(-1);
      let y = 30;
      const visible = (i) => withViews || role(i) !== "view";
      const opRow = (i, y, inset) => {
        rep[i] = rows.length;
        rows.push({ kind: "op", op: i, y, h: ROW - 3, x: (ops.half[i] ? B : F) + inset, w: (ops.half[i] ? BW : FW) - 2 * inset });
      };
      // An operator and its backward stand side by side: both have the number of the autograd node.
      const run = (list, backs, inset) => {
        const groups = [];
        for (const i of list.filter(visible)) {
          const last = groups[groups.length - 1];
          if (last && last.seq === ops.seq[i]) last.left.push(i); else groups.push({ seq: ops.seq[i], left: [i], right: [] });
        }
        const of = new Map(groups.map((g) => [g.seq, g]));
        let group = groups[0];
        for (const i of backs.filter(visible)) {
          group = of.get(ops.seq[i]) || group;
          if (!group) groups.push((group = { seq: -1, left: [], right: [] }));
          group.right.push(i);
        }
        for (const { left, right } of groups) {
          left.forEach((i, k) => opRow(i, y + k * ROW, inset));
          right.forEach((i, k) => opRow(i, y + k * ROW, inset));
          y += Math.max(left.length, right.length) * ROW;
        }
        y += groups.length ? 4 : 0;
      };
      const claim = (node, number) => { node.own.forEach((i) => (rep[i] = number)); node.children.forEach((c) => claim(c, number)); };
      const place = (node, inset) => {
        const number = rows.length, isOpen = open.has(node.id);
        if (node !== root) {
          rows.push({ kind: "mod", node, y, h: isOpen ? 0 : LEAD - 4, x: 8 + inset, w: W - 16 - 2 * inset, open: isOpen });
          y += LEAD;
          if (!isOpen) { claim(node, number); return; }
        }
        // Stretches of own operators between the modules inside, each with the backward of what is in it.
        const own = node.own.filter((i) => !ops.half[i]), backs = node.own.filter((i) => ops.half[i]).reverse();
        const stretches = [[]];
        let next = 0;
        for (const i of own) {
          while (next < node.children.length && node.children[next].total.first < i) { stretches.push([]); next++; }
          stretches[stretches.length - 1].push(i);
        }
        while (stretches.length <= node.children.length) stretches.push([]);
        const bySeq = new Map();
        stretches.forEach((list, k) => list.forEach((i) => { if (ops.seq[i] >= 0) bySeq.set(ops.seq[i], k); }));
        const beside = stretches.map(() => []);
        let last = stretches.length - 1;
        for (const i of [...backs].reverse()) { const k = bySeq.get(ops.seq[i]); if (k !== undefined) last = k; beside[last].unshift(i); }
        const deeper = node === root ? inset : inset + 6;
        stretches.forEach((list, k) => {
          run(list, beside[k], deeper);
          if (k < node.children.length) place(node.children[k], deeper);
        });
        if (node !== root) { rows[number].h = y - rows[number].y - 2; y += 5; }
      };
      place(root, 0);
      return y + 16;
    }

    function resolve(i, seen) {
      // The operators that an operand's value comes from, where views are not drawn.
      if (rep[i] >= 0) return [rep[i]];
      return role(i) === "view" ? ops.reads[i].flatMap((r) => resolve(r, seen)) : [];
    }
    function anchor(row, half, side) {
      if (row.kind === "op") return [side === "l" ? row.x : row.x + row.w, row.y + row.h / 2];
      const x = half ? (side === "l" ? B : B + BW) : side === "l" ? F : F + FW;
      return [x, row.y + 12];
    }
    function edges() {
      const found = new Map();
      for (let i = 0; i < count; i++) {
        if (rep[i] < 0) continue;
        for (const r of ops.reads[i]) for (const from of resolve(r)) {
          const to = rep[i];
          const crosses = !ops.half[r] && ops.half[i];
          if (from === to && !crosses) continue;
          const key = `${from}|${to}|${ops.half[r]}${ops.half[i]}`;
          const row = savedRow.get(r);
          const bytes = crosses && row && row[3] === "saved" ? row[1] : 0;
          const edge = found.get(key) || { from, to, a: ops.half[r], b: ops.half[i], bytes: 0 };
          edge.bytes += bytes;
          found.set(key, edge);
        }
      }
      return [...found.values()];
    }
    const thick = (bytes) => Math.max(1, Math.min(8, (8 * Math.sqrt(bytes)) / Math.sqrt(most))).toFixed(1);
    function draw() {
      const height = layout(), out = [], all = edges();
      const plain = all.filter((e) => e.a === e.b).length;
      const lines = all.map((e, k) => {
        const s = rows[e.from], t = rows[e.to];
        let d, cls = "edge";
        if (e.a !== e.b) {
          if (!e.bytes) { if (e.a) return ""; cls += " faint"; }
          const [x1, y1] = anchor(s, 0, "r"), [x2, y2] = anchor(t, 1, "l");
          d = `M${x1} ${y1}C${x1 + 50} ${y1} ${x2 - 50} ${y2} ${x2} ${y2}`;
          cls += " keep";
          return `<path class="${cls}" data-e="${e.from} ${e.to}" stroke-width="${e.bytes ? thick(e.bytes) : 0.6}" d="${d}"/>`;
        }
        const right = e.a === 1, side = right ? "r" : "l";
        const [x1, y1] = anchor(s, e.a, side), [x2, y2] = anchor(t, e.b, side);
        const away = Math.min(18, 5 + Math.abs(y2 - y1) / 14) * (right ? 1 : -1);
        if (plain > 2500 && Math.abs(y2 - y1) > 120) return "";
        d = `M${x1} ${y1}C${x1 + away} ${y1} ${x2 + away} ${y2} ${x2} ${y2}`;
        return `<path class="${cls}" data-e="${e.from} ${e.to}" d="${d}"/>`;
      }).join("");
      rows.forEach((row, k) => out.push(row.kind === "mod" ? moduleBox(row, k) : pill(row, k)));
      $("scene").innerHTML = `<svg width="${W}" height="${height}" viewBox="0 0 ${W} ${height}" role="presentation">` +
        `<text class="colhead f" x="${F}" y="20">forward, downwards</text><text class="colhead b" x="${B}" y="20">backward, upwards</text>` +
        `<text class="small" x="${F + FW + GAP / 2}" y="20" text-anchor="middle">saved</text>` +
        out.filter((_, k) => rows[k].kind === "mod" && rows[k].open).join("") + lines + out.filter((_, k) => !(rows[k].kind === "mod" && rows[k].open)).join("") + "</svg>";
      at = Math.min(at, rows.length - 1);
      mark();
    }
    function moduleBox(row, k) {
      const t = row.node.total, n = row.node;
      const sign = row.open ? "▾" : "▸";
      const head = `<g class="row" data-k="${k}" role="treeitem" aria-expanded="${row.open}" aria-level="${n.depth}" aria-label="${esc(n.path)}, ${esc(n.cls)}">` +
        `<rect class="mod ${row.open ? "" : "shut"}" x="${row.x}" y="${row.y}" width="${row.w}" height="${row.h}" rx="6"/>`;
      const title = `<text class="modname" x="${row.x + 10}" y="${row.y + 16}">${sign} ${esc(n.name)} <tspan class="small" font-weight="400">${esc(n.cls)}</tspan></text>`;
      if (row.open) return head + title + (t.saved ? `<text class="small" x="${F + FW + GAP / 2}" y="${row.y + 16}" text-anchor="middle">${inBytes(t.saved)}</text>` : "") + "</g>";
      const bar = (x, cls, text) => `<rect class="pill ${cls}" x="${x}" y="${row.y + 5}" width="58" height="14" rx="7"/><text class="small" x="${x + 29}" y="${row.y + 16}" text-anchor="middle">${text}</text>`;
      return head + title + bar(F + FW - 62, "f", t.f) + bar(B + 4, "b", t.b) +
        (t.again ? bar(B + 66, "again", t.again) : "") +
        (t.saved ? `<path class="edge keep" data-e="${k} ${k}" stroke-width="${thick(t.saved)}" d="M${F + FW - 4} ${row.y + 12}H${F + FW + GAP / 2 - 36}M${F + FW + GAP / 2 + 36} ${row.y + 12}H${B + 4}"/>` +
          `<text class="small kept" x="${F + FW + GAP / 2}" y="${row.y + 16}" text-anchor="middle">${inBytes(t.saved)}</text>` : "") +
        (t.flops ? `<text class="small" x="${row.x + row.w - 10}" y="${row.y + 16}" text-anchor="end">${inFlops(t.flops)}</text>` : "") + "</g>";
    }
    function pill(row, k) {
      const i = row.op, r = role(i), cls = (ops.half[i] ? "b " : "f ") + (r === "operator" ? "" : r);
      const row_ = savedRow.get(i), bytes = row_ && row_[2] === "saved" && row_[1] ? inBytes(row_[1]) : ops.type[i].startsWith("(") ? inBytes(ops.bytes[i]) : ops.type[i].length > 20 ? ops.type[i].slice(0, 19) + "…" : ops.type[i];
      const room = Math.floor((row.w - 24 - 6.8 * bytes.length) / 6.4), name = brief(i);
      const label = name.length > room ? name.slice(0, Math.max(3, room - 1)) + "…" : name;
      return `<g class="row" data-k="${k}" role="treeitem" aria-label="${esc(ops.name[i])}, ${esc(ops.op[i])}, ${esc(r)}"><rect class="pill ${cls}" x="${row.x}" y="${row.y}" width="${row.w}" height="${row.h}" rx="4"/>` +
        `<text class="opname" x="${row.x + 8}" y="${row.y + 12.5}">${esc(label)}</text><text class="optype" x="${row.x + row.w - 8}" y="${row.y + 12.5}" text-anchor="end">${esc(bytes)}</text></g>`;
    }
    function mark() {
      const scene = $("scene");
      const own = selected >= 0 ? rep[selected] : -1;
      scene.querySelectorAll(".row").forEach((g) => {
        const k = Number(g.dataset.k), row = rows[k];
        g.classList.toggle("at", k === at && document.activeElement === scene);
        g.classList.toggle("on", k === own && row.kind === "op");
        g.classList.toggle("dim", Boolean(wanted) && !matches(row));
      });
      scene.querySelectorAll(".edge").forEach((e) => { const [a, b] = e.dataset.e.split(" ").map(Number); e.classList.toggle("hot", own >= 0 && (a === own || b === own)); });
    }
    const MOST_UNFOLDED = 200;
    const hit = (i) => (ops.name[i] + " " + ops.op[i] + " " + data.lines[ops.line[i]]).toLowerCase().includes(wanted);
    const matches = (row) => {
      if (row.kind === "op") return hit(row.op);
      const inside = (n) => n.path.toLowerCase().includes(wanted) || n.own.some(hit) || n.children.some(inside);
      return inside(row.node);
    };
    function show(k) {
      const scene = $("scene"), row = rows[k];
      if (!row) return;
      if (row.y < scene.scrollTop + 20 || row.y > scene.scrollTop + scene.clientHeight - 60) scene.scrollTop = Math.max(0, row.y - scene.clientHeight / 2);
    }
    function reveal(op) {
      for (let n = home[op]; n; n = n.parent) open.add(n.id);
      if (role(op) === "view" && !withViews) { withViews = true; $("views").checked = true; }
    }
    function act(k) {
      const row = rows[k];
      if (!row) return;
      at = k;
      if (row.kind === "op") { select(row.op, "graph"); return; }
      const id = row.node.id;
      if (open.has(id)) open.delete(id); else open.add(id);
      draw();
    }
    const scene = $("scene");
    scene.addEventListener("click", (event) => { const g = event.target.closest(".row"); if (g) act(Number(g.dataset.k)); });
    scene.addEventListener("mousemove", (event) => {
      const g = event.target.closest(".row"), row = g && rows[Number(g.dataset.k)];
      tip(row && row.kind === "op" ? tipOf(row.op) : null, event.clientX, event.clientY);
    });
    scene.addEventListener("mouseleave", () => tip(null));
    scene.addEventListener("focus", mark);
    scene.addEventListener("blur", mark);
    scene.addEventListener("keydown", (event) => {
      const row = rows[at];
      if (event.key === "ArrowDown") at = Math.min(rows.length - 1, at + 1);
      else if (event.key === "ArrowUp") at = Math.max(0, at - 1);
      else if (event.key === "Home") at = 0;
      else if (event.key === "End") at = rows.length - 1;
      else if (event.key === "ArrowRight" && row && row.kind === "mod" && !row.open) return event.preventDefault(), act(at);
      else if (event.key === "ArrowLeft" && row && row.kind === "mod" && row.open) return event.preventDefault(), act(at);
      else if (event.key === "Enter" || event.key === " ") return event.preventDefault(), act(at);
      else return;
      event.preventDefault();
      mark(); show(at);
    });
    $("fold").addEventListener("click", () => { open.clear(); open.add(0); at = 0; draw(); });
    $("unfold").addEventListener("click", () => { for (const n of nodes.filter((n) => open.has(n.id))) n.children.forEach((c) => open.add(c.id)); draw(); });
    $("views").addEventListener("change", (event) => { withViews = event.target.checked; draw(); });
    $("find").addEventListener("input", (event) => {
      wanted = event.target.value.trim().toLowerCase();
      const hits = wanted ? ops.name.map((_, i) => i).filter((i) => shown(i) && hit(i)) : [];
      const inPaths = wanted ? nodes.filter((n) => n.path.toLowerCase().includes(wanted)).length : 0;
      $("found").textContent = wanted ? `${hits.length} operators, ${inPaths} modules` : "";
      const hidden = hits.filter((i) => rep[i] < 0 || rows[rep[i]].kind !== "op").slice(0, MOST_UNFOLDED);
      if (hidden.length) { hidden.forEach(reveal); draw(); }
      mark();
      const k = wanted ? rows.findIndex(matches) : -1;
      if (k >= 0) { at = k; show(k); }
    });
    let waiting = 0;
    addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => { fit(); draw(); }, 120); });
    listeners.push((op, from) => {
      if (op >= 0 && from !== "graph" && shown(op)) { reveal(op); draw(); at = rep[op]; show(at); } else mark();
    });
    draw();
  }

  // ------------------------------------------------------------------ source
  if (count) source();
  function source() {
    let current = 0;
    const tabs = $("source-tabs"), code = $("code");
    const place = data.sources.map((s) => { const m = new Map(); s.ops.forEach((op, n) => { if (op >= 0 && !m.has(op)) m.set(op, n); }); return m; });
    const paint = (text) => {
      let out = "", rest = text;
      const token = /(#.*$)|("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b(def|return|import|from|if|is|not|and|or|for|in|while|try|except|lambda|class|with|as|None|True|False|raise|else)\b|(torch\.ops\.[\w.]+)|\b(\d[\w.]*)\b/;
      for (let m; rest && (m = token.exec(rest)); rest = rest.slice(m.index + m[0].length)) {
        const cls = m[1] ? "hc" : m[2] ? "hs" : m[3] ? "hk" : m[4] ? "ho" : "hn";
        out += esc(rest.slice(0, m.index)) + `<span class="${cls}">${esc(m[0])}</span>`;
      }
      return out + esc(rest);
    };
    function draw() {
      tabs.innerHTML = data.sources.map((s, k) => `<button type="button" role="tab" aria-selected="${k === current}" data-k="${k}">${esc(s.title)}</button>`).join("");
      const { lines, ops: of } = data.sources[current];
      code.innerHTML = lines.map((text, n) => {
        const op = of[n], r = op < 0 ? "" : role(op), cls = r === "saved" || r === "again" ? r : "";
        return `<div class="ln ${cls}" data-n="${n}"${op < 0 ? "" : ` data-op="${op}"`}><b>${n + 1}</b><span>${paint(text)}</span></div>`;
      }).join("");
      const first = of.findIndex((op) => op >= 0 && !["input", "tangent"].includes(role(op)));
      code.scrollTop = Math.max(0, first - 2) * 18; // past the inputs
    }
    function mark(op, from) {
      code.querySelectorAll(".ln.on").forEach((l) => l.classList.remove("on"));
      if (op < 0) return;
      if (!place[current].has(op)) {
        const other = place.findIndex((p) => p.has(op));
        if (other < 0) return;
        current = other; draw();
      }
      const line = code.children[place[current].get(op)];
      line.classList.add("on");
      if (from !== "source") code.scrollTop = place[current].get(op) * 18 - code.clientHeight / 2;
    }
    code.addEventListener("click", (event) => { const l = event.target.closest(".ln[data-op]"); if (l) select(Number(l.dataset.op), "source"); });
    code.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const lines = [...code.querySelectorAll(".ln[data-op]")], now = lines.findIndex((l) => l.classList.contains("on"));
      const next = lines[Math.max(0, Math.min(lines.length - 1, now + step))];
      if (next) { select(Number(next.dataset.op), "source"); code.scrollTop = Number(next.dataset.n) * 18 - code.clientHeight / 2; }
    });
    tabs.addEventListener("click", (event) => { const k = event.target.dataset.k; if (k !== undefined) { current = Number(k); draw(); mark(selected, "tabs"); } });
    listeners.push(mark);
    draw();
  }

  // ------------------------------------------------------------------ tables
  (function tables() {
    let current = 0, order = null, down = true, most = 200;
    const tabs = $("table-tabs"), box = $("table"), formats = { bytes: inBytes, flops: inFlops, seconds: inSeconds, count: String, share: (n) => (100 * n).toFixed(1) + "%" };
    function rowsOf(table) {
      const wanted = $("filter").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
      let rows = table.rows.map((_, n) => n);
      if (wanted.length) rows = rows.filter((n) => { const text = table.rows[n].join(" ").toLowerCase(); return wanted.every((w) => text.includes(w)); });
      if (order !== null) {
        const isText = table.columns[order][1] === "text", sign = down ? -1 : 1;
        rows.sort((a, b) => { const x = table.rows[a][order], y = table.rows[b][order]; return sign * (isText ? String(x).localeCompare(String(y), undefined, { numeric: true }) : x - y) || a - b; });
      }
      return rows;
    }
    function draw() {
      tabs.innerHTML = data.tables.map((t, k) => `<button type="button" role="tab" aria-selected="${k === current}" data-k="${k}">${esc(t.title)} <small>${t.rows.length}</small></button>`).join("");
      const table = data.tables[current];
      if (!table) return;
      const rows = rowsOf(table), largest = table.columns.map(([, kind], c) => (kind === "bytes" || kind === "share" ? Math.max(...table.rows.map((r) => r[c]), 1e-9) : 0));
      $("about").textContent = table.about + (rows.length < table.rows.length ? ` ${rows.length} of ${table.rows.length} rows.` : "");
      const head = table.columns.map(([name, kind], c) => `<th class="${kind === "text" ? "" : "num"}" aria-sort="${order === c ? (down ? "descending" : "ascending") : "none"}"><button type="button" data-c="${c}">${esc(name)}${order === c ? (down ? " ↓" : " ↑") : ""}</button></th>`).join("");
      const body = rows.slice(0, most).map((n) => {
        const op = table.ops ? table.ops[n] : -1;
        const cells = table.rows[n].map((value, c) => {
          const kind = table.columns[c][1];
          if (kind === "text") return `<td${String(value).length > 40 ? ` title="${esc(value)}"` : ""}>${esc(value)}</td>`;
          const bar = largest[c] && c === table.columns.findIndex(([, k]) => k === "bytes" || k === "share") ? `<i class="bar" style="width:${Math.round((48 * value) / largest[c])}px"></i>` : "";
          return `<td class="num">${bar}${formats[kind](value)}</td>`;
        });
        return `<tr${op >= 0 ? ` data-op="${op}" tabindex="0"` : ""}${op >= 0 && op === selected ? ' class="on"' : ""}>${cells.join("")}</tr>`;
      }).join("");
      const rest = rows.length - most;
      box.innerHTML = `<table><thead><tr>${head}</tr></thead><tbody>${body}</tbody></table>` + (rest > 0 ? `<button type="button" class="morerows">show ${Math.min(rest, 1000)} more of ${rest}</button>` : "");
    }
    tabs.addEventListener("click", (event) => { const b = event.target.closest("button"); if (b) { current = Number(b.dataset.k); order = null; most = 200; draw(); } });
    box.addEventListener("click", (event) => {
      if (event.target.classList.contains("morerows")) { most += 1000; draw(); return; }
      const c = event.target.dataset.c;
      if (c !== undefined) {
        const kind = data.tables[current].columns[c][1];
        down = order === Number(c) ? !down : kind !== "text";
        order = Number(c); draw();
        box.querySelector(`[data-c="${c}"]`).focus();
        return;
      }
      const row = event.target.closest("tr[data-op]");
      if (row) select(Number(row.dataset.op), "tables");
    });
    box.addEventListener("keydown", (event) => { const row = event.target.closest("tr[data-op]"); if (row && event.key === "Enter") select(Number(row.dataset.op), "tables"); });
    $("filter").addEventListener("input", draw);
    listeners.push((op) => box.querySelectorAll("tr[data-op]").forEach((row) => row.classList.toggle("on", op >= 0 && Number(row.dataset.op) === op)));
    draw();
  })();

  // Code in advice, as it is written in plain text.
  document.querySelectorAll("[data-text]").forEach((li) => { li.innerHTML = esc(li.dataset.text).replace(/`([^`]+)`/g, "<code>$1</code>"); });
  const wanted = new URLSearchParams(location.hash.slice(1)).get("select");
  if (wanted && byKey.has(wanted)) select(byKey.get(wanted), "address");
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
})();
