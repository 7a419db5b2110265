# SPDX-License-Identifier: Apache-2.0
"""The program in Lua that Envoy runs for each request and each answer.

It sends requests for a session that was begun over HTTP to the replica that has the session, whose
id is in the query, or in the body of upstream's JSON-RPC. If the route is a refusal, the program
does not wait for a body, which might never come.

It refuses a request with two `Authorization` headers, as a replica does: Envoy joins both by a
comma, so that the replica could not tell.

It tells a client that the replica of its session is gone. Envoy reads no WebSocket frames. When the
connection to a replica ends, it closes the client's without a reason. Just before, it passes an
empty piece of the answer to its filters (as it does once after the handshake). The program replaces
this piece by what a replica sends whose shard has exited: an error in its protocol and a close
frame. In the middle of a message, it sends only the close frame; after a close frame, or in the
middle of a frame, nothing. For that it reads the lengths of frames, and never their contents.

https://www.envoyproxy.io/docs/envoy/latest/configuration/http/http_filters/lua_filter
"""

from __future__ import annotations

SOURCE = r"""
local function id_in_body(handle)
  local length = tonumber(handle:headers():get("content-length") or "")
  if not length or length > 1048576 then return nil end
  local body = handle:body()
  if not body then return nil end
  return string.match(body:getBytes(0, body:length()), '"session_id"%s*:%s*"([%x-]+)"')
end

local function note(handle, name, value)
  handle:streamInfo():dynamicMetadata():set("openenvd", name, value)
end

-- Commas stand between parameters of one header, too, as in `Digest a="b", c=d`.
local function is_repeated(value)
  for part in string.gmatch(string.gsub(value, '"[^"]*"', ""), ",([^,]*)") do
    if not string.match(part, "^%s*[%w-]+%s*=") then return true end
  end
  return false
end

function envoy_on_request(handle)
  local headers = handle:headers()
  if is_repeated(headers:get("authorization") or "") then
    handle:respond({[":status"] = "403", ["content-type"] = "application/json"},
                   '{"detail": "more than one Authorization header is not allowed"}')
    return
  end
  local path = headers:get(":path") or ""
  if headers:get("upgrade") then  -- behind a token the route is at the end
    note(handle, "protocol", string.match(path, "^/envs/[^/?]+/(%a+)$") or
                             string.match(path, "[?&]token=[^?&/%%]+/(%a+)$") or "")
    note(handle, "environment", string.match(path, "^/envs/([%w._-]+)") or "")
  end
  if not handle:metadata():get("has_replicas") then return end
  local id = string.match(path, "[?&]session_id=([%x-]+)")
  if not id and headers:get(":method") == "POST" and string.find(path, "/mcp", 1, true) then
    id = id_in_body(handle)
  end
  if not id or #id ~= 36 then return end
  local endpoint = handle:metadata():get(string.lower(string.sub(id, 25, 28)))
  if endpoint then note(handle, "endpoint", endpoint) end
end

local ERRORS = {  -- in the protocols of these routes; a project's own have another
  ws = '{"type": "error", "data": {"message": "%s", "code": "SESSION_ERROR"}}',
  mcp = '{"jsonrpc": "2.0", "error": {"code": -32000, "message": "%s"}, "id": null}',
}

local function frame(opcode, payload)
  local head = string.char(128 + opcode, #payload)
  if #payload > 125 then
    head = string.char(128 + opcode, 126, math.floor(#payload / 256), #payload % 256)
  end
  return head .. payload
end

local function notice(known, is_in_message)
  local reason = "The replica of this session is gone; the session has ended"
  local close = frame(8, "\003\243" .. reason)  -- 1011
  local message = ERRORS[known.protocol]
  if not message or is_in_message then return close end
  local text = reason .. " (`openenv status " .. known.environment .. "` shows why)."
  return frame(1, string.format(message, text)) .. close
end

-- Find the frame that a piece of the stream ends with. Servers do not mask their frames.
local function follow(stream, piece)
  local length, at = piece:length(), stream.left
  while at < length do
    local head = stream.head .. piece:getBytes(at, math.min(10 - #stream.head, length - at))
    local first, size = string.byte(head, 1, 2)
    local whole = 2
    if size and size > 125 then whole = size == 126 and 4 or 10 end
    if #head < whole then
      stream.head, at = head, length
      break
    end
    if whole > 2 then
      size = 0
      for place = 3, whole do size = size * 256 + string.byte(head, place) end
    end
    at = at - #stream.head + whole + size
    stream.head, stream.is_closed = "", first % 16 == 8
    if first % 16 < 8 then stream.is_in_message = first < 128 end
  end
  stream.left = at - length
end

function envoy_on_response(handle)
  if handle:headers():get(":status") ~= "101" then return end
  local known = handle:streamInfo():dynamicMetadata():get("openenvd")
  local stream = {left = 0, head = "", is_begun = false}
  for piece in handle:bodyChunks() do
    if piece:length() > 0 or not stream.is_begun then
      stream.is_begun = true
      follow(stream, piece)
    elseif stream.left == 0 and stream.head == "" and not stream.is_closed then
      piece:setBytes(notice(known, stream.is_in_message))
    end
  end
end
"""
