// SPDX-License-Identifier: Apache-2.0
// The page: signs in, follows the stream, and shows the overview or one page.
//
// `app`, which every panel and page is given:
//   store                    what the stream has sent (store.js)
//   api(method, path, body)  JSON in, JSON out; raises with `.message` and `.hint`
//   fetch(path, options)     the same for anything that is no JSON
//   followLog(name, onText)  the text of `requests/ID` or `environments/NAME`, on the tab's stream;
//                            one at a time, until it is called with null
//   submit(operation, payload, options)   queues a request, and returns it
//   go(hash), say(text), ask(question), confirm(question)
//   now()                    the daemon's clock, in seconds

import { ask, confirm, say } from "./dialogs.js";
import { age, copyButton, h, lag, number, renewAges, text } from "./dom.js";
import { pages, panels } from "./panels.js";
import { Stream, api, call, signIn } from "./session.js";
import { Store } from "./store.js";

const store = new Store();
const stream = new Stream();
let skew = 0; // the daemon's clock less the browser's

const app = {
  store, api, fetch: call, say, ask, confirm,
  followLog: (name, onText) => stream.followLog(name, onText),
  now: () => Date.now() / 1000 + skew,
  go: (hash) => { location.hash = hash; },
  submit: async (operation, payload, options = {}) =>
    (await api("POST", "/v1/requests", { operation, payload, ...options })).request,
};

const main = document.getElementById("main");
let shown = []; // what is mounted: {update, tick, unmount, stop}

function mount(part, place, argument) {
  const body = h("div", { class: "body" });
  const heading = h("h2", { id: `${part.id}-title` }, part.title ?? "");
  const section = h("section", { id: part.id, class: "panel", "aria-labelledby": heading.id }, heading, body);
  place.append(section);
  const mounted = part.mount(body, { ...app, section, heading }, argument);
  mounted.stop = store.listen(part.kinds ?? [], (kinds) => { mounted.update?.(kinds); renewAges(section, app.now()); });
  if (store.one("daemon")) mounted.update?.(new Set(part.kinds));
  shown.push(mounted);
}

function show() {
  for (const each of shown) { each.stop(); each.unmount?.(); }
  shown = [];
  main.replaceChildren();
  const [, name, ...rest] = location.hash.split("/");
  const page = pages[name];
  main.dataset.page = page ? name : "overview";
  if (page) {
    for (const panel of panels) if (panel.isEverywhere) mount(panel, main);
    main.append(h("p", { class: "back" }, h("a", { href: "#/" }, "← Overview")));
    mount(page, main, decodeURIComponent(rest.join("/")));
  } else {
    const places = { top: h("div"), main: h("div"), machine: h("div") };
    for (const [name, place] of Object.entries(places)) { place.className = name; main.append(place); }
    for (const panel of panels) mount(panel, places[panel.place ?? "main"]);
  }
  renewAges(main, app.now());
}

// The header.

const connection = document.getElementById("connection");
const figures = document.getElementById("figures");
const figure = (name, title) => { const value = h("dd"); figures.append(h("div", { title }, h("dt", {}, name), value)); return value; };
const sessions = figure("sessions", "Sessions open in all environments");
const running = figure("running", "Requests that run");
const waiting = figure("waiting", "Requests that wait");
const failed = figure("failed", "Requests that failed, and are not forgotten yet");
const up = figure("up", "How long the daemon has run");
up.append(age(null));

let installation; // of this page's files: that of the first daemon that it sees
let address = "";
let alarm = "";
const showTitle = () => { document.title = `${alarm}openenvd ${address}`; };
app.setAlarm = (words) => { alarm = words ? `(${words}) ` : ""; showTitle(); };

/** Whether a field of a form is not as it was at first. */
function isChanged(field) {
  if (field.options) return field.selectedIndex !== Math.max(0, [...field.options].findIndex((each) => each.defaultSelected));
  if (field.type === "checkbox") return field.checked !== field.defaultChecked;
  return field.value !== field.defaultValue;
}

/** Another daemon has other files: load them, unless that would lose a question, or what is typed into a form. */
function loadAgain() {
  const fields = document.querySelectorAll("form :is(input, select, textarea)");
  if (!document.querySelector("dialog") && ![...fields].some(isChanged)) location.reload();
  else if (!document.getElementById("updated")) {
    document.querySelector("header").append(h("p", { id: "updated", class: "notice", role: "alert" },
      "The daemon was updated. Reload this page; what is typed here will be lost."));
  }
}

store.listen(["daemon", "environments"], () => {
  const daemon = store.one("daemon");
  if (!daemon) return;
  const now = JSON.stringify(daemon.installation);
  installation ??= now;
  if (installation !== now) loadAgain();
  text(sessions, number([...store.all("environments").values()].reduce((sum, each) => sum + each.sessions, 0)));
  text(running, number(daemon.requests.RUNNING));
  text(waiting, number(daemon.requests.PENDING));
  text(failed, number(daemon.requests.FAILED));
  up.firstChild.dataset.since = daemon.started_at;
  renewAges(figures, app.now());
  address = daemon.address.split("//")[1];
  showTitle();
  connection.title = `openenvd ${daemon.version}, pid ${daemon.pid}, ${daemon.home}; answers within ${lag(daemon.loop.p99_seconds)}`;
  text(document.getElementById("version"), daemon.version);
});

function setConnection(state) {
  const words = { connected: "● live", lost: "✕ daemon away; trying again", "signed-out": "○ signed out" };
  text(connection, words[state]);
  document.getElementById("away")?.remove();
  if (state === "lost") {
    const command = store.one("daemon")?.start ?? "openenv up";
    document.querySelector("header").append(h("p", { id: "away", class: "notice", role: "alert" },
      "The daemon has ended or does not answer; environments go on. Bring it back: ", h("code", {}, command), " ", copyButton(app, "command", () => command)));
  }
  document.body.dataset.connection = state;
  if (state === "signed-out") showSignIn();
}

function showSignIn(error) {
  main.replaceChildren(h("section", { class: "panel notice", "aria-labelledby": "sign-in" },
    h("h2", { id: "sign-in" }, "Sign in"),
    error ? h("p", { role: "alert" }, `${error.message}.`) : null,
    h("p", {}, "Run this on the machine of the daemon, and open the link that it prints:"),
    h("p", { class: "buttons" }, h("code", { class: "command" }, "openenv dashboard"), copyButton(app, "command", () => "openenv dashboard"))));
}

const SHORTCUTS = { "g e": ["#/", "environments"], "g l": ["#/launch", "launch"], "g q": ["#/requests", "all requests"], "g r": ["#/rollouts", "rollouts"] };
const showShortcuts = () => ask({ title: "Shortcuts", action: "Close", text: ["?   this list", "/   search or filter",
  ...Object.entries(SHORTCUTS).map(([keys, [, title]]) => `${keys}   ${title}`)].join("\n") });
document.getElementById("shortcuts").addEventListener("click", showShortcuts);
let pressed = "";
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  const place = SHORTCUTS[`${pressed} ${event.key}`]?.[0];
  pressed = event.key;
  if (place) app.go(place);
  else if (event.key === "?") showShortcuts();
  else if (event.key === "/") {
    const search = [...document.querySelectorAll("[data-search]")].find((each) => each.checkVisibility());
    if (search) { event.preventDefault(); search.focus(); }
  }
});

document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });

async function start() {
  try {
    if (!(await signIn())) { setConnection("signed-out"); return; }
  } catch (error) {
    setConnection("signed-out");
    showSignIn(error);
    return;
  }
  document.getElementById("launch").hidden = !pages.launch;
  addEventListener("hashchange", () => { show(); main.focus({ preventScroll: true }); scrollTo(0, 0); });
  show();
  setInterval(() => {
    renewAges(document, app.now());
    for (const each of shown) each.tick?.(app.now());
  }, 1000);
  await stream.follow((name, data) => {
    skew = data.at - Date.now() / 1000;
    if (name === "snapshot") store.snapshot(data);
    else store.change(data);
  }, setConnection);
}

start();
