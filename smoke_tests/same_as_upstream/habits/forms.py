# SPDX-License-Identifier: Apache-2.0
"""Forms of sessions, of an environment's factory, and of its app."""

from .habit import BETTER, ON_PURPOSE, habit

SEEN: list[str] = []


class Habits:
    @habit(resets=False, steps=("look", "look"), ours=ON_PURPOSE + "reset first")
    def steps_first(self, how):
        """A session that steps before any reset."""

    @habit(
        alone=True,
        ours=BETTER + "each session has a process of its own, and none is refused",
        at_end="""
            Environment.SUPPORTS_CONCURRENT_SESSIONS = False
            app = create_app(Environment, Do, Seen, state_cls=Kept)
        """,
    )
    def one_session(self, how):
        """A class that is not marked for several sessions."""
        return how

    @habit(
        alone=True,
        ours=ON_PURPOSE + "module state",
        at_end="""
            one = Environment()
            app = create_app(lambda: one, Do, Seen, max_concurrent_envs=8, state_cls=Kept)
        """,
    )
    def one_instance(self, how):
        """A factory that returns one instance for all sessions."""
        return how

    @habit(
        also="reset",
        posts=(
            ("/reset", {"habit": "answers_http", "method": "GET", "self": 1, "seed": 3}),
            ("/reset", {"habit": "answers_http", "request": {"a": 1}, "func": 2}),
            ("/step", {"action": {"how": "go"}}),
        ),
    )
    def answers_http(self, how):
        """HTTP resets with parameters called `method`, `self` and `request`."""
        return self.options

    @habit(
        ours=ON_PURPOSE + "middleware",
        at_end="""
            from habits.forms import SEEN
            def seeing(app):
                async def served(scope, receive, send):
                    async def seen():
                        message = await receive()
                        SEEN.append(message["type"])
                        return message
                    await app(scope, seen, send)
                return served
            app.add_middleware(seeing)
        """,
    )
    def middleware(self, how):
        """ASGI middleware that sees the messages of WebSockets."""
        return "websocket.receive" in SEEN

    @habit(
        isolated=ON_PURPOSE + "hooks",
        at_end="""
            import habits.forms
            app.router.on_startup.append(lambda: habits.forms.SEEN.append("started"))
        """,
    )
    def start_hooks(self, how):
        """A start-up hook that makes what all sessions use."""
        return SEEN.count("started")
