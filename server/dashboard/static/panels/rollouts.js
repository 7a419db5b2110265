// SPDX-License-Identifier: Apache-2.0
// Rollouts: all of them, one of them live, and its episodes step by step.
//
//   #/rollouts                     the list
//   #/rollouts/<id>                one: figures, charts, its finished episodes
//   #/rollouts/<id>/<episode>      the same, with that episode below

import { cancel } from "../actions.js";
import { histogramChart, lineChart, short } from "../charts.js";
import { age, duration, h, keyed, state, table, text } from "../dom.js";
import { replay } from "../replay.js";

const MAX_MARKS = 600; // of the charts
const EPISODES_A_PAGE = 25;
const MIN_SECONDS = 2; // between two looks into the folder
const KEPT = "finished episodes are kept; the same command plays the missing ones";
const COST_SHARE = 10; // and at least this many times what the last one took

export default {
  mount(body, app, argument) {
    const [id, episode] = (argument || "").split("/");
    return id ? oneRollout(body, app, id, episode) : allRollouts(body, app);
  },
};

const isFinal = (state) => ["SUCCEEDED", "FAILED", "CANCELLED"].includes(state);
const milliseconds = (seconds) => (seconds === null ? null : seconds * 1000);
const words = (reason) => reason.replaceAll("_", " ");

const counts = (reasons) => Object.entries(reasons || {}).sort((a, b) => b[1] - a[1]).map(([reason, count]) => `${count} ${words(reason)}`).join(", ");
const truncated = (report) => (report.truncated ? `${short(report.truncated)} truncated: ${short(report.truncated_mean_reward)}` : "");
const there = (rollout) => rollout.report.there ?? rollout.report.episodes ?? 0;
const areTrees = (rollout) => rollout.report.unit === "tree";

function allRollouts(body, app) {
  const none = h("p", { class: "quiet" }, "No rollout yet: ", h("code", {}, "openenv rollout echo --out out"));
  const list = table("Rollouts, newest first", [
    ["Rollout"], ["State"], ["Ago", "number p2"], ["Took", "number p2"], ["Episodes", "number"], ["Mean reward", "number"], ["Failed", "number p2"], ["Policy", "p2"], ["Folder", "p2"],
  ]);
  body.append(none, list.element);

  function update() {
    const found = [...app.store.all("rollouts").values()].sort((a, b) => b.created_at - a.created_at);
    none.hidden = found.length > 0;
    list.element.hidden = !found.length;
    keyed(list.body, found, (rollout) => rollout.id, makeRow);
  }

  return { update };
}

function makeRow(rollout) {
  const badge = state(rollout.state);
  const [took, episodes, reward, failed] = ["number p2", "number", "number", "number p2"].map((kind) => h("td", { class: kind }));
  const row = h("tr", {},
    h("td", {}, h("a", { href: `#/rollouts/${rollout.id}` }, rollout.environments.join(", "))),
    h("td", {}, badge), h("td", { class: "number p2" }, age(rollout.created_at)), took, episodes, reward, failed,
    h("td", { class: "p2" }, rollout.policy), h("td", { class: "path p2" }, rollout.out));
  row.update = (now) => {
    badge.update(now.state);
    text(took, now.started_at && now.finished_at ? duration(now.finished_at - now.started_at) : "–");
    text(episodes, `${short(there(now))} of ${short(now.episodes)}${areTrees(now) ? " trees" : ""}`);
    text(reward, now.report.mean_reward == null ? truncated(now.report) || "–" : short(now.report.mean_reward));
    text(failed, short(now.report.failed ?? 0));
  };
  return row;
}

function oneRollout(body, app, id, episode) {
  const head = makeHead(app);
  const tiles = h("dl", { class: "tiles" });
  const charts = makeCharts();
  const problem = h("p", { class: "problem", role: "status" });
  const list = episodeList(app, id, showEpisode);
  const stage = h("section", { class: "replay", "aria-label": "Episode" });
  const episodes = h("div", { class: "episodes" }, list.element, stage);
  body.append(head, tiles, problem, charts.element, episodes);

  let marks = [];
  let rollout = null;
  let player = null;
  let nextLook = 0;
  let seen = -1;
  let isLooking = false;
  let isGone = false;

  app.api("GET", `/v1/rollouts/${id}`).then((answer) => {
    marks = [...answer.history, ...marks.filter((mark) => mark.at > lastAt(answer.history))];
    if (!rollout) noteGone(answer.rollout);
    charts.drawHistory(marks);
  }, fail);
  if (episode) showEpisode(episode);

  function fail(error) {
    text(problem, [error.message, error.hint].filter(Boolean).join("; "));
  }

  function noteGone(request) {
    // It ended so long ago that the stream does not have it.
    const { name, more_names: more = [], policy, out, episodes: wanted } = request.payload;
    rollout = { ...request, environments: [name, ...more], policy, out, episodes: wanted, report: request.result || {} };
    show();
  }

  function update() {
    const found = app.store.get("rollouts", id);
    if (!found) return;
    rollout = found;
    const { report } = rollout;
    if (report.at && report.at > lastAt(marks)) {
      marks.push(report);
      if (marks.length > MAX_MARKS) marks = marks.filter((_, at) => at % 2 === 0);
      charts.drawHistory(marks);
    }
    show();
  }

  function show() {
    text(app.heading, `Rollout of ${rollout.environments.join(", ")}`);
    head.update(rollout);
    tiles.replaceChildren(...tilesOf(rollout, marks));
    look();
  }

  async function look() {
    const now = performance.now() / 1000;
    if (isLooking || isGone || now < nextLook || seen === there(rollout)) return;
    isLooking = true;
    const wanted = there(rollout);
    try {
      const [summary] = await Promise.all([app.api("GET", `/v1/rollouts/${id}/summary`), list.load()]);
      charts.drawRewards(summary);
      text(problem, "");
      // What was reported as written is durable, and seen, up to a second later.
      seen = summary.episodes >= wanted || isFinal(rollout.state) ? wanted : -1;
    } catch (error) {
      if (isFinal(rollout.state) || error.status !== 404) fail(error);
      if (isFinal(rollout.state)) seen = wanted;
    }
    const after = performance.now() / 1000;
    nextLook = after + Math.max(MIN_SECONDS, COST_SHARE * (after - now));
    isLooking = false;
  }

  function showEpisode(episodeId) {
    if (player) player.close();
    history.replaceState(null, "", `#/rollouts/${id}/${episodeId}`);
    player = replay(stage, app, id, episodeId);
    list.mark(episodeId);
  }

  return {
    update,
    tick: () => rollout && look(),
    unmount() {
      isGone = true;
      if (player) player.close();
    },
  };
}

const lastAt = (marks) => (marks.length ? marks.at(-1).at : 0);

function makeHead(app) {
  const badge = state("PENDING");
  const what = h("p", { class: "quiet" });
  const link = h("a", {}, "Its request and log");
  const error = h("p", { class: "problem" });
  const stop = h("button", { type: "button", class: "danger", onclick: () => cancel(app, { ...shown, label: "this rollout" }, KEPT) }, "Cancel");
  const element = h("div", { class: "rollout-head" }, what, h("p", { class: "actions" }, badge, link, stop), error);
  let shown = null;
  element.update = (rollout) => {
    shown = rollout;
    badge.update(rollout.state);
    text(what, `Policy ${rollout.policy}, into ${rollout.out}`);
    link.href = `#/request/${rollout.id}`;
    stop.hidden = isFinal(rollout.state);
    const problems = [rollout.error?.message, rollout.error?.hint, ...(rollout.report.damaged || [])];
    text(error, problems.filter(Boolean).join("; "));
    error.hidden = !error.textContent;
  };
  return element;
}

function tilesOf(rollout, marks) {
  const { report } = rollout;
  const rate = isFinal(rollout.state) ? average(report) : rates(marks).at(-1)?.[1];
  const failed = counts(report.failures);
  const odd = counts(report.odd_rewards);
  const tile = (name, value, more) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value, more ? h("small", {}, ` ${more}`) : ""));
  return [
    tile(areTrees(rollout) ? "Trees" : "Episodes", short(there(rollout)), `of ${short(rollout.episodes)}`),
    tile("Steps", short(report.steps ?? 0)),
    tile("Steps a second", short(rate)),
    tile("Mean reward", short(report.mean_reward), truncated(report)),
    ...(odd ? [tile("Rewards that are no numbers", odd)] : []),
    tile("Failed", short(report.failed ?? 0), failed),
    tile("Delay", short(milliseconds(report.lag_p99_seconds ?? null)), "ms"),
  ];
}

const average = (report) => (report.seconds ? report.steps / report.seconds : null);

function rates(marks) {
  return marks.slice(1).flatMap((mark, place) => {
    const [seconds, steps] = [mark.at - marks[place].at, mark.steps - marks[place].steps];
    return seconds > 0 && steps >= 0 ? [[mark.at, steps / seconds]] : [];
  });
}

function makeCharts() {
  const rewards = lineChart("Reward over time");
  const histogram = histogramChart("Reward of the episodes");
  const speed = lineChart("Steps a second", { fromZero: true });
  const failures = lineChart("Failed episodes", { fromZero: true, names: ["failed", "retries"] });
  const lag = lineChart("Delay", { unit: "ms", fromZero: true, names: ["but for a hundredth", "longest"] });
  const all = [rewards, histogram, speed, failures, lag];
  const element = h("div", { class: "charts" }, ...all.map((chart) => chart.element));
  rewards.draw([]);
  histogram.draw(null);

  function drawHistory(marks) {
    const line = (name, key, of = (value) => value) => ({ name, points: marks.map((mark) => [mark.at, of(mark[key])]) });
    speed.draw([{ name: "steps a second", points: rates(marks) }]);
    failures.draw([line("failed", "failed"), line("retries", "retries")]);
    lag.draw([line("delay", "lag_p99_seconds", milliseconds), line("longest", "lag_max_seconds", milliseconds)]);
  }

  function drawRewards(summary) {
    const spans = summary.over_time;
    const [points, band] = [spans.map((span) => [span.at, span.mean]), spans.map((span) => [span.at, span.least, span.most])];
    rewards.draw([{ name: `mean of ${summary.rewards_of} episodes`, points, band }]);
    histogram.draw(summary.histogram);
  }

  drawHistory([]);
  return { element, drawHistory, drawRewards };
}

function episodeList(app, id, show) {
  const place = h("span");
  const button = (title, step) => h("button", { type: "button", class: "quiet", onclick: () => {
    offset = Math.max(0, offset + step);
    load().catch((error) => app.say(error.message));
  } }, title);
  const [before, after] = [button("Earlier", -EPISODES_A_PAGE), button("Later", EPISODES_A_PAGE)];
  const list = table("Finished episodes", [
    ["Episode"], ["Status"], ["Reward", "number"], ["Steps", "number"], ["Seconds", "number"], ["Environment", "where"],
  ]);
  const rows = list.body;
  const element = h("section", { "aria-label": "Episodes" },
    h("h3", {}, "Episodes"), list.element, h("p", { class: "pages" }, before, place, after));
  let offset = 0;
  let marked = null;
  let shown = "";

  async function load() {
    const path = `/v1/rollouts/${id}/episodes?offset=${offset}&limit=${EPISODES_A_PAGE}`;
    const answer = await app.api("GET", path);
    const last = offset + answer.episodes.length;
    place.textContent = last ? `${offset + 1} to ${last} of ${short(answer.total)}` : "none yet";
    before.disabled = offset === 0;
    after.disabled = last >= answer.total;
    const found = JSON.stringify(answer.episodes);
    if (found === shown) return; // a focused button stays
    shown = found;
    list.table.classList.toggle("one-place", new Set(answer.episodes.map((row) => row.environment)).size < 2);
    rows.replaceChildren(...answer.episodes.map(rowOfEpisode));
    mark(marked);
  }

  function rowOfEpisode(row) {
    const open = h("button", { type: "button", class: "quiet small", "data-episode": row.episode_id, onclick: () => show(row.episode_id) }, row.episode_id);
    const status = row.failure_reason ? words(row.failure_reason) : row.status;
    return h("tr", {}, h("td", {}, open), h("td", { title: row.failure_message || "" }, row.filtered ? `${status}, filtered` : status),
      [row.total_reward, row.steps, row.finished_at - row.started_at].map((value) => h("td", { class: "number" }, short(value))),
      h("td", { class: "where" }, row.environment));
  }

  function mark(episodeId) {
    marked = episodeId;
    for (const open of rows.querySelectorAll("button")) {
      open.setAttribute("aria-pressed", String(open.dataset.episode === episodeId));
    }
  }

  return { element, load, mark };
}
