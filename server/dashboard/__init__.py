# SPDX-License-Identifier: Apache-2.0
"""The dashboard: one page, and the stream that keeps it up to date.

    routes.py               the page, signing in, the stream, playing by hand
    live_state.py           `LiveState`: entities as JSON, and their changes for each viewer;
                            `Feed`: refreshes the sources and sends changes while a page is open,
                            with the log that it shows
    memory.py, environments.py, requests.py     sources: each reads a part of the daemon, and puts
                            its entities
    static/                 the page: HTML, CSS, JavaScript modules; nothing is built

Signing in is in `server/api/security.py`, beside the guard that checks it.

The data flow:

    event bus ──▶ Feed.run() ──▶ each source.refresh(state, turn) ──▶ LiveState.put / drop
    every second ─▶    └──▶ LiveState.flush(): one `change`, rendered once ──▶ a queue a viewer

The stream, `GET /v1/dashboard/stream` (server-sent events):

    event: snapshot     data: {"at": 1790000000.0, "put": {kind: {id: entity, …}, …}}
    event: change       data: {"at": …, "put": {kind: {id: entity, …}}, "drop": {kind: [id, …]}}
    event: log          data: {"text": "…", "is_first": false, "place": "FILE:OFFSET"}     with
                        `?log=requests/ID`, or `?log=environments/NAME`; an event with `is_first`
                        replaces earlier text; `&place=…` of the last event continues after it
    : ping              a comment, each 15 seconds without a change

A snapshot replaces everything that the page knows. A change has whole entities: put replaces the
entity of that id, drop removes it. There is no replay: a page that reconnects gets a snapshot. If
more than `MAX_WAITING_CHARACTERS` wait for a viewer, they are dropped, and it gets a snapshot when
it reads again. Only changes are sent. With `?is_look=true` it ends after the snapshot and the log
so far.

A browser opens at most six connections to one server, for all of its windows. So a window has one
stream and short calls, and only three windows have a stream; further ones poll every 2 seconds, a
hidden one every 30 (`static/session.js`).

Kinds, and the fields of their entities (times are seconds since the epoch, sizes bytes):

    daemon        ""        version, installation, address, home, pid, started_at, loop,
                            requests: {state: count}, start: the command that starts it again; a
                            page that was loaded from another installation reloads
    memory        ""        limit, daemon, zygote, workers, replicas, other, reserve, free
    samples       second    the fields of `memory` in their order: one each 30 seconds
    workers       name      name, schedule, pid, guaranteed, task_id, label, rss_bytes,
                            cap_bytes, tasks_run
    plan          ""        guaranteed and burst workers by schedule (`executor.policy.plan.Plan`)
    environments  name      as `GET /v1/environments`, `replicas` being a count, and: ready,
                            restarts, steps, steps_per_second, lag_p99_seconds, memory_bytes,
                            waiting
    replicas      id        as there, and: environment, max_sessions, steps_per_second,
                            lag_p99_seconds, memory_bytes, shards
    requests      id        as `GET /v1/requests`, without `payload` and `result`: the first 10
                            waiting of each schedule, with their `place`, those that run, with
                            their last `progress`, and those that ended lately
    faults        cause     what is wrong, one entity per cause: {ids, count, kind, at, subject,
                            environment, message, hint, command, evidence, log_tail, page, is_seen,
                            runs_again_with_bytes: of an attempt that `--retry-oom` repeats}; see
                            `FaultKind` in environments.py
    rollouts      id        the newest 50: id, state, environments, policy, out, episodes,
                            created_at, started_at, finished_at, error, report: as a row of
                            the history of `GET /v1/rollouts/{id}`

A source is a class with `async def refresh(self, state, turn)` (`Source` in `live_state.py`), and a
line in `routes.py`. While a page is open, `refresh` is called after events,
at most four times a second, and once a second (`turn.is_tick`). `turn.is_first` asks for all
entities. A source does not block the loop: it reads files through `asyncio.to_thread`.

A part of the page is a module in `static/panels/`, and a line in `static/panels.js`. A *panel* is a
section of the overview, a *page* is shown alone at `#/<name>/<argument>`:

    export default {
      id: "memory", title: "Memory", kinds: ["memory", "samples"], place: "top",  // main, side
      mount(body, app, argument) {          // body: an empty element, app: see static/app.js
        return { update(kinds) {},          // once at first, then when one of `kinds` has changed
                 tick(now) {},              // each second, for ages; may be left out
                 unmount() {} };            // may be left out
      },
    };

`app` is described in `static/app.js`; elements and formats are in `static/dom.js`. Trusted Types
are required: no `innerHTML`, no inline style or script; `element.style.width = …` is allowed.
Images come from `data:` and `blob:` alone. A new module has a line `modulepreload` in `index.html`
too, if the overview needs it; pages are loaded when they are first shown.

Failure cases:

* The daemon ends: the stream ends. The page says so, tries again each second, and then gets a
  snapshot. The session stays valid, because it is signed with the daemon's token.
* A source fails: the defect is logged once, its entities stay as they were, the others go on.
* Events were dropped (`Subscription.lagged`): the next turn looks at everything.
"""
