# SPDX-License-Identifier: Apache-2.0
"""A project's Dockerfile: what it installs, and what it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from openenvd.environments.sources.dockerfile import Installed, Started, installed, started

APP = Started("main", "app")


@pytest.mark.parametrize(
    ("run", "files", "packages", "options"),
    [
        ("pip install -r requirements.txt", ["requirements.txt"], [], []),
        ("pip install --requirement=a.txt -rb.txt", ["a.txt", "b.txt"], [], []),
        ("pip3 install --no-cache-dir fastapi 'uvicorn[standard]>=0.30'", [],
         ["fastapi", "uvicorn[standard]>=0.30"], []),
        ('["pip", "install", "a==1"]', [], ["a==1"], []),
        ("--mount=type=cache,target=/root/.cache pip install a", [], ["a"], []),
        ("apt-get install -y curl; python -m pip install -U pip a", [], ["a"], []),
        ("uv pip install --system --index-url https://x/simple a \\\n    b", [], ["a", "b"], []),
        ("pip install -e . && pip install .[dev]", [], [], ["--extra dev"]),
        ("pip install -e '/app[a, b]' x", [], ["x"], ["--extra a", "--extra b"]),
        ("uv sync --frozen --extra=server --group dev --all-extras", [], [],
         ["--extra server", "--group dev", "--all-extras"]),
        ("pip install git+https://github.com/x/y@z", [], ["git+https://github.com/x/y@z"], []),
        ("apt-get install -y python3-pip", [], [], []),
        ("sh -c 'pip install a'", [], ["a"], []),
        ("echo 'unbalanced", [], [], []),
    ],
)  # fmt: skip
def test_what_run_instructions_install_is_read(
    run: str, files: list[str], packages: list[str], options: list[str]
) -> None:
    text = f'# syntax=x\nFROM python:3.11 AS one\n  RUN {run}\nCMD ["x"]\n'
    assert installed(text) == Installed(files, packages, options)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ('CMD ["uvicorn", "main:app", "--host", "0.0.0.0"]', APP),
        ("CMD uvicorn main:app --port ${PORT:-8000}", APP),
        ('CMD ["python", "-m", "uvicorn", "main:app"]', APP),
        ('CMD ["uv", "run", "--no-sync", "uvicorn", "main:app"]', APP),
        ('CMD ["sh", "-c", "exec gunicorn -k x.workers.UvicornWorker -b 0:80 main:app"]', APP),
        ('ENTRYPOINT ["uvicorn"]\nCMD ["main:app"]', APP),
        ('ENTRYPOINT ["tini", "--"]\nCMD ["hypercorn", "main:app"]', APP),
        ('CMD ["uvicorn", "old:app"]\nCMD ["uvicorn", "main:app"]', APP),
        ("CMD cd /app/env && uvicorn main:app", Started("main", "app", folder="/app/env")),
        ("CMD uvicorn --app-dir=src main:app",
         Started("main", "app", folder="src", is_app_dir=True)),
        ("CMD uvicorn main:create_app --factory", Started("main", "create_app", is_factory=True)),
        ("CMD uvicorn 'main:create_app()'", Started("main", "create_app", is_factory=True)),
        ('CMD ["python", "-m", "server.app", "--port", "80"]', Started("server.app")),
        ('CMD ["uv", "run", "python", "server/app.py"]', Started("server.app")),
        ("CMD python -u /app/main.py", Started("app.main")),
        ('CMD ["fastapi", "run", "src/main.py"]', Started("src.main")),
        ('CMD ["uv", "run", "--project", ".", "serve"]', Started("pkg.server.app")),
        ("CMD ./start.sh", APP),
        ('ENTRYPOINT ["/app/enter.sh"]\nCMD ["uvicorn", "main:app"]', APP),
        ('ENTRYPOINT ["sh", "enter.sh", "uvicorn"]\nCMD ["main:app"]', APP),
        ('ENTRYPOINT ["bash", "/app/start.sh"]', APP),
        ("# a comment\nCMD \\\n# another\n  uvicorn \\\n  main:app", APP),
        ('CMD ["nginx", "-g", "daemon off;"]', None),
        ('CMD [""]', None),
        ("CMD", None),
        ("RUN uvicorn main:app", None),
    ],
)  # fmt: skip
def test_what_a_dockerfile_starts_is_read(
    tmp_path: Path, lines: str, found: Started | None
) -> None:
    (tmp_path / "start.sh").write_text("#!/bin/sh\nset -e\nexport A=1\nexec uvicorn main:app\n")
    (tmp_path / "enter.sh").write_text('#!/bin/sh\nset -e\nexec "$@"\n')
    scripts = {"serve": "pkg.server.app:main"}
    assert next(started(f"FROM x\n{lines}\n", tmp_path, scripts), None) == found
