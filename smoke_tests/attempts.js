// SPDX-License-Identifier: Apache-2.0
// Sends every kind of request that a page can send to a server; resolves to the answers.
async ({server, posts, gets, sockets}) => {
  const tried = {};
  const json = {'content-type': 'application/json'};
  const limited = promise => Promise.race(
    [promise, new Promise(resolve => setTimeout(() => resolve('nothing'), 3000))]);
  const ask = (name, path, options) => fetch(server + path, options).then(
    answer => { tried[name + ' ' + path] = answer.status; },
    () => { tried[name + ' ' + path] = 'blocked'; });
  const load = (name, tag, path) => new Promise(resolve => {
    const element = document.createElement(tag);
    element.onload = () => { tried[name + ' ' + path] = 'loaded'; resolve(); };
    element.onerror = () => { tried[name + ' ' + path] = 'blocked'; resolve(); };
    element.src = server + path;
    document.body.append(element);
  });
  const submit = (path, type, body) => new Promise(resolve => {
    const frame = document.createElement('iframe');
    frame.name = 'f' + Math.random();
    document.body.append(frame);
    const form = document.createElement('form');
    Object.assign(form, {action: server + path, method: 'post', enctype: type});
    form.target = frame.name;
    const field = document.createElement('input');
    [field.name, field.value] = [body.slice(0, -2), body.slice(-2)];
    form.append(field);
    document.body.append(form);
    frame.onload = () => resolve();
    form.submit();
  });
  const connect = path => new Promise(resolve => {
    const socket = new WebSocket(server.replace('http', 'ws') + path);
    socket.onopen = () => {
      socket.send('{"type":"reset","data":{}}');
      socket.send('{"type":"step","data":{}}');
    };
    let messages = 0;
    socket.onmessage = () => { if (++messages == 2) { socket.close(); } };
    socket.onclose = () => {
      tried['websocket ' + path] = messages ? 'open' : 'blocked';
      resolve();
    };
  });
  const all = [];
  for (const [path, body] of Object.entries(posts)) {
    all.push(ask('json', path, {method: 'POST', headers: json, body}));
    all.push(ask('text', path, {method: 'POST', body}));
    all.push(ask('no-cors', path, {method: 'POST', mode: 'no-cors', body}));
    all.push(ask('beacon', path, {method: 'POST', mode: 'no-cors', keepalive: true, body}));
    for (const type of ['text/plain', 'application/x-www-form-urlencoded', 'multipart/form-data']) {
      all.push(submit(path, type, body));
    }
  }
  for (const path of gets) {
    all.push(ask('cors', path, {}));
    all.push(ask('no-cors', path, {mode: 'no-cors'}));
    all.push(load('image', 'img', path), load('script', 'script', path));
    all.push(load('frame', 'iframe', path));
  }
  await limited(Promise.all(all));
  await limited(Promise.all(sockets.map(connect)));
  return tried;
}
