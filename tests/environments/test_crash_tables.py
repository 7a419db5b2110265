# SPDX-License-Identifier: Apache-2.0
"""Each line of a table of failures, in a docstring, has a test with real processes."""

import re
from pathlib import Path
from types import ModuleType

import pytest

from openenvd.environments.agent import agent, replica
from openenvd.environments.shim import loop

HERE = Path(__file__).parent
SHIM = {
    "the server exits": "exit_code_is_reported",
    "it forks orphans": "orphans_of_the_server_are_killed_when_it_exits",
    "it cannot be started": "port_in_use_is_reported_and_start_tries_again",
    "a grandchild is killed": "kill_of_a_grandchild_for_memory_leaves_the_server_alone",
    "the shim is SIGKILLed": "server_of_a_killed_shim_is_killed_and_its_orphans_can_be_stopped",
    "the daemon exits": "a_shim_without_clients_is_found_again",
    "its home is removed": "shim_and_server_exit_when_their_home_was_removed",
    "the disk is full": "full_disk_silences_the_status_file_but_not_the_shim",
    "a client leaves": "no_half_invalid_or_endless_line_disturbs_the_shim",
    "a client does not read": "client_that_does_not_read_never_blocks_the_shim",
    "two clients": "two_clients_hear_the_same",
    "drain": "a_drained_server_is_not_started_again_when_its_sessions_have_ended",
    "stop twice": "server_that_ignores_sigterm_is_killed_after_the_shortest_grace",
    "start while running": "start_changes_nothing_or_makes_a_new_generation",
    "the server is unused": "a_client_that_connects_wakes_a_server_that_sleeps",
    "we are killed then": "a_shim_killed_while_its_server_sleeps_is_replaced_by_one_that_serves",
    "two shims": "second_shim_of_a_run_directory_leaves",
    "SIGTERM": "sigterm_to_the_shim_is_a_stop",
}
REPLICA = {
    "starting, no instance": "a_replica_that_was_not_started_yet_is_started_by_the_next_agent",
    "ready, no instance": "an_instance_that_was_removed_while_no_agent_ran_is_lost",
    "draining": "a_drain_outlives_the_agent",
    "stopping, an instance": "a_stop_goes_on_when_the_agent_is_killed_while_it_stops",
    "stopping, no instance": "what_was_removed_and_not_yet_reported_is_stopped",
    "stopping, never asked": "what_no_engine_was_asked_to_start_is_stopped_without_its_answer",
}
AGENT = {
    "it is killed": "an_exit_is_told_when_who_was_away_is_back",
    "the engine is gone": "an_engine_that_fails_or_is_gone_loses_no_replica",
    "its library is missing": "what_keeps_an_engine_from_starting_fails_the_launch_with_the_remedy",
    "two agents": "agents_that_are_started_at_the_same_time_are_one",
    "a run folder is removed": "strays_are_listed_and_stopped_by_who_they_are",
    "a run file is unreadable": "a_run_file_that_nobody_can_use_keeps_no_other_from_being_served",
    "its home is removed": "an_agent_whose_socket_is_gone_makes_way_for_the_next",
    "it has nothing to do": "an_agent_without_replicas_ends",
}


def cases(module: ModuleType, heading: str) -> list[str]:
    """The first column of the table below a heading in a docstring."""
    table = (module.__doc__ or "").partition(heading)[2].strip("\n").split("\n\n")[0]
    lines = [line for line in table.splitlines() if re.match(r"    \S", line)]
    return [re.split(r"\s{2,}", line.strip())[0] for line in lines]


@pytest.mark.parametrize(
    ("module", "heading", "tests", "file"),
    [
        (loop, "What happens when\n", SHIM, "shim/test_shim.py"),
        (replica, "from which the next one continues:\n", REPLICA, "test_engine_agent.py"),
        (agent, "Failure cases\n", AGENT, "test_engine_agent.py"),
    ],
)
def test_each_case_has_its_test(
    module: ModuleType, heading: str, tests: dict[str, str], file: str
) -> None:
    assert cases(module, heading) == list(tests)
    defined = re.findall(r"def test_(\w+)\(", (HERE / file).read_text())
    assert set(tests.values()) <= set(defined)
