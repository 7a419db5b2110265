# SPDX-License-Identifier: Apache-2.0
"""A project's Dockerfile: what it installs, and what it starts."""

from pathlib import Path

import pytest

from openenvd.environments.sources.dockerfile import (
    Started,
    parse_dockerfile,
    started,
    variables_here,
)

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
    found = parse_dockerfile(text, Path())
    assert (found.files, found.packages, found.options) == (files, packages, options)


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
    dockerfile = parse_dockerfile(f"FROM x\n{lines}\n", tmp_path)
    assert next(iter(started(dockerfile, scripts)), None) == found


@pytest.mark.parametrize(
    ("lines", "here", "only_there"),
    [
        ("ENV A=1 B='two words' C=#3;&4", {"A": "1", "B": "two words", "C": "#3;&4"}, ()),
        ("ENV TURNS 7 of 9", {"TURNS": "7 of 9"}, ()),
        ("ENV A=1\nENV A=2 B=$A", {"A": "2", "B": "1"}, ()),
        ("ARG N=5\nENV A=${N} B=${M:-6} C=$M", {"A": "5", "B": "6"}, ("C",)),
        ("ENV A=1\nFROM y AS Two\nENV B=2\nFROM two\nENV C=3", {"B": "2", "C": "3"}, ()),
        ("ENV PATH=/x PYTHONPATH=/x LD_A=1 HOME=/h UV_B=1 PIP_C=1 PORT=1 HOST=h", {}, ()),
        ("ENV A=/etc/hosts B=/tmp/new C=/gone:/x D=a/b E=http://h/x F=/",
         {"A": "/etc/hosts", "B": "/tmp/new", "D": "a/b", "E": "http://h/x", "F": "/"}, ("C",)),
        ("ENV BASE_PATH=/web DATA_DIR=/web", {"BASE_PATH": "/web"}, ("DATA_DIR",)),
        ("WORKDIR /app\nCOPY . .\nENV A=/app/data/ B=/app C=/application D=sqlite:////app/x.db",
         {"A": "{p}/data/", "B": "{p}", "D": "sqlite:///{p}/x.db"}, ("C",)),
        ("ENV H=/h\nWORKDIR $H\nWORKDIR app\nCOPY --chown=u . $H/app\nENV A=$H/app/x B=/h/y",
         {"A": "{p}/x"}, ("H", "B")),
        ('COPY ["data", "/srv/words/"]\nCOPY --from=b out /srv\nENV A=/srv/words/a B=/srv/b',
         {"A": "{p}/data/a"}, ("B",)),
        ("COPY . /\nENV A=/data B=/gone", {"A": "{p}/data"}, ("B",)),
        (f"COPY {'x' * 300} /\nENV A=/{'x' * 300}", {}, ("A",)),
    ],
)  # fmt: skip
def test_the_variables_of_the_image_are_those_of_the_server_here(
    tmp_path: Path, lines: str, here: dict[str, str], only_there: tuple[str, ...]
) -> None:
    for name in ("data", "out"):
        (tmp_path / name).mkdir()
    found = variables_here(parse_dockerfile(f"FROM x\n{lines}\n", tmp_path))
    values = {name: text.format(p=tmp_path) for name, text in here.items()}
    assert found == values | dict.fromkeys(only_there)
