# SPDX-License-Identifier: Apache-2.0
"""What a Slurm job runs on a node that sees no folder of the daemon's machine.

    agent ◀──the token, from the job's environment── job
          ──plan, files──▶ this node's own openenvd makes a program of them (`prepared_there.py`)
          ◀──output, address, heartbeat, exit──  and is the job that serves it (`slurm_job.py`)

The node needs openenvd of the daemon's version; projects and their virtual environments are made in
openenvd's home there, once for each version of their files.

Failure cases

    the agent does not answer, or     the job ends, with a line that nobody sees but Slurm's log;
    knows no such job                 the daemon says that the job has not been heard of
    what is launched cannot be made   its reason is in the log, and the job ends with code 1
    ready, or the disk is full
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from ...env_host.protocol import HOST_CONFIG_VARIABLE
from ...system.json_lines import Json
from ..engines.slurm_job import Job, end_as
from ..engines.slurm_options import TOKEN_VARIABLE, URL_VARIABLE
from ..engines.slurm_posting import FAILURES, AgentAddress, PostedReports
from ..errors import EnvironmentsError
from .prepared_there import prepare_here, variables_here


def prepared(plan: Json, agent: AgentAddress) -> Json:
    """Return a replica's plan with the program that serves it on this node.

    Raises:
        EnvironmentsError, OSError: It cannot be made ready here.
    """
    what = plan["source"]
    with tempfile.TemporaryFile() as files:

        def take(message: Json) -> None:
            if message.get("wants_files"):
                with agent.open("/files") as archive:
                    shutil.copyfileobj(archive, files)
                files.seek(0)
            else:
                sys.stderr.write(f"{message['say']}\n")

        program = prepare_here(what, files, take)
    config = json.dumps(program.config.to_json())
    return plan | {
        "command": list(program.argv),
        "folder": str(program.folder),
        "links": {name: str(target) for name, target in program.links.items()},
        "env": {**variables_here(what["spec"]["env"]), **plan["env"], HOST_CONFIG_VARIABLE: config},
    }


def _serve(agent: AgentAddress) -> int:
    with tempfile.TemporaryDirectory(prefix="openenvd-job-") as folder:
        reports = PostedReports(agent, Path(folder))
        plan = reports.begin()
        try:
            reports.plan = prepared(plan, agent)
            return Job(reports).run()
        except (EnvironmentsError, *FAILURES) as exc:
            hint = getattr(exc, "hint", None)
            sys.stderr.write(f"{exc}\n" + (f"{hint}\n" if hint else ""))
            return 1
        finally:
            sys.stderr.flush()
            reports.close()


def main() -> int:
    """Be a job; ends by the signal that has ended its server."""
    os.umask(0o077)
    url, token = os.environ.pop(URL_VARIABLE), os.environ.pop(TOKEN_VARIABLE)
    agent = AgentAddress(url, token, os.environ["SLURM_JOB_ID"])
    try:
        return end_as(_serve(agent))
    except FAILURES as exc:
        sys.stderr.write(f"{agent.url} does not tell this job what to do: {exc}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
