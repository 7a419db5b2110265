# SPDX-License-Identifier: Apache-2.0
from habits import MODULES
from habits.habit import habits_in
from openenv.core.env_server.http_server import create_app
from serving import SERVED, Do, Kept, Seen

HABITS = {habit.name: habit for module in (MODULES,) for habit in habits_in(module.Habits)}


class Environment(SERVED):
    ONLY = HABITS.get("NAME")
    HABITS = {} if ONLY else HABITS


app = create_app(Environment, Do, Seen, max_concurrent_envs=8, state_cls=Kept)
