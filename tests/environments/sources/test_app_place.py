# SPDX-License-Identifier: Apache-2.0
"""Which app of a project is served, wherever its author has put and named it."""

from pathlib import Path

import pytest

from openenvd.environments.sources.app_place import App, choose_app
from openenvd.schema.errors import UnknownSource

APP = "app = object()\n"
RUN = "import uvicorn\nuvicorn.run(app)\n"
PLACES = ["server/app.py", "app.py", "main.py", "app/main.py"]
COMMANDS = {
    "exec": 'CMD ["uvicorn", "{reference}"]',
    "shell": "CMD uvicorn {reference} --port 80",
    "gunicorn": 'CMD ["gunicorn", "-k", "uvicorn.workers.UvicornWorker", "{reference}"]',
    "module": 'CMD ["python", "-m", "{module}"]',
    "uv run": 'CMD ["uv", "run", "uvicorn", "{reference}"]',
    "file": "CMD python {path}",
}


def put(folder: Path, path: str, text: str = APP) -> str:
    """Write a module; returns the reference of its app."""
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)
    return path.removesuffix(".py").replace("/", ".") + ":app"


def choose(folder: Path, named: str | None = None, **scripts: str) -> App:
    found = choose_app(folder, named, f"{folder}/openenv.yaml, line 2", scripts)
    assert found is not None
    return found


def starting(folder: Path, *lines: str) -> App:
    """The app of a project whose Dockerfile has these lines."""
    (folder / "Dockerfile").write_text("\n".join(["FROM x", *lines, ""]))
    return choose(folder)


@pytest.mark.parametrize("path", PLACES)
def test_the_only_app_is_found_in_each_usual_place_and_named(tmp_path: Path, path: str) -> None:
    reference = put(tmp_path, path)
    found = choose(tmp_path)
    assert found.reference == reference
    is_upstreams = path == "server/app.py"
    assert (found.note is None) is is_upstreams
    assert is_upstreams or reference in str(found.note)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("path", PLACES)
@pytest.mark.parametrize("named", [None, "other:app"])
def test_of_two_apps_that_of_the_dockerfile_is_served_and_named(
    tmp_path: Path, path: str, command: str, named: str | None
) -> None:
    reference = put(tmp_path, path)
    put(tmp_path, path, f"{APP}import uvicorn\nuvicorn.run({reference!r})\n")
    put(tmp_path, "other.py")
    put(tmp_path, "main.py" if path == "server/app.py" else "server/app.py")
    text = COMMANDS[command].format(reference=reference, module=reference[:-4], path=path)
    (tmp_path / "Dockerfile").write_text(f"FROM x\n{text}\n")
    found = choose(tmp_path, named)
    assert (found.reference, found.package) == (reference, None)
    assert f"serving {reference}, which Dockerfile starts" in str(found.note)
    assert ("line 2 names other:app" in str(found.note)) is (named is not None)


def test_two_apps_and_no_word_on_which_is_said(tmp_path: Path) -> None:
    put(tmp_path, "main.py")
    put(tmp_path, "app.py")
    found = choose(tmp_path)
    assert found.note == "serving app:app; to serve main:app, name it as `app` in openenv.yaml"


def test_one_app_that_two_name_alike_needs_no_word(tmp_path: Path) -> None:
    put(tmp_path, "server/app.py")
    (tmp_path / "Dockerfile").write_text("CMD uvicorn my_env.server.app:app\n")
    place = str(tmp_path / "Dockerfile")
    assert choose(tmp_path, "server.app:app") == App("server.app:app", place, package="my_env")


@pytest.mark.parametrize(
    ("named", "text", "reference"),
    [
        ("server.app:main", APP + "def main(): ...\n", "server.app:app"),
        ("pkg.server.app:main", APP + "def main(): ...\n", "pkg.server.app:app"),
        ("server.app:main", "api = 1\ndef main():\n uvicorn.run(api)\n", "server.app:api"),
        ("server.app:main", "s = 1\ndef main():\n uvicorn.run(s.app)\n", "server.app:s.app"),
        ("server.app:create_app", "def create_app(): ...\n", "server.app:create_app()"),
        ("server.app:create_app()", APP + "def create_app(): ...\n", "server.app:create_app()"),
        ("server.app:create_app", APP + "def create_app(): ...\n", "server.app:app"),
        ("server.app:api", "api: object = 1\n", "server.app:api"),
        ("server.app:app", "from x import app\n", "server.app:app"),
        ("server.app:app", "from x import *\n", "server.app:app"),
        ("server.app:app", "try:\n  app = 1\nfinally: ...\n", "server.app:app"),
        ("server.app:app", "async def app(scope, receive, send): ...\n", "server.app:app"),
        ("server.app:app", "def app(): ...\n", "server.app:app"),
        ("server.app:app", "this is no Python", "server.app:app"),
        (
            "server.app:main",
            "server = 1\ndef main():\n uvicorn.run('server.app:app')\napp = 1\n",
            "server.app:app",
        ),
        ("server.app:web.app", "web = 1\n", "server.app:web.app"),
        ("not.there:app", APP, "not.there:app"),
    ],
)
def test_a_named_app_is_what_its_module_has_under_that_name(
    tmp_path: Path, named: str, text: str, reference: str
) -> None:
    put(tmp_path, "server/app.py", text)
    found = choose(tmp_path, named)
    assert (found.reference, found.place) == (reference, f"{tmp_path}/openenv.yaml, line 2")


def test_a_named_app_that_is_not_there_gives_way_to_the_one_that_is(tmp_path: Path) -> None:
    put(tmp_path, "main.py")
    found = choose(tmp_path, "old.server:app")
    assert (found.reference, found.fallback) == ("old.server:app", "main:app")


@pytest.mark.parametrize("is_run_by", ["docker", "nothing"])
def test_a_program_that_serves_another_module_names_its_app(tmp_path: Path, is_run_by: str) -> None:
    put(tmp_path, "backend.py")
    put(tmp_path, "server/app.py", "import uvicorn\ndef main():\n uvicorn.run('backend:app')\n")
    if is_run_by == "docker":
        (tmp_path / "Dockerfile").write_text('CMD ["python", "-m", "server.app"]\n')
    found = choose(tmp_path)
    assert found.reference == "backend:app"


@pytest.mark.parametrize(
    ("lines", "folder"),
    [
        ("CMD cd /app/backend && uvicorn core:app", "backend"),
        ("CMD cd backend && uvicorn core:app", "backend"),
        ("WORKDIR /app/backend\nCMD uvicorn core:app", "backend"),
        ("CMD uvicorn --app-dir backend core:app", "backend"),
        (
            "CMD gunicorn -b :$PORT --chdir backend -k uvicorn.workers.UvicornWorker core:app",
            "backend",
        ),
        ("WORKDIR /app\nCMD uvicorn root:app", None),
        ("CMD cd app && uvicorn root:app", "app"),
    ],
)
def test_a_folder_that_the_command_runs_in_is_imported_from(
    tmp_path: Path, lines: str, folder: str | None
) -> None:
    for path in ("backend/core.py", "root.py", "app/root.py"):
        put(tmp_path, path)
    found = starting(tmp_path, lines)
    assert found.reference in ("core:app", "root:app")
    assert found.folders == (() if folder is None else (tmp_path / folder,))
    assert found.cwd == (None if folder is None or "--app-dir" in lines else tmp_path / folder)


def test_folders_of_pythonpath_are_imported_from(tmp_path: Path) -> None:
    put(tmp_path, "main.py")
    (tmp_path / "lib").mkdir()
    lines = "ENV PYTHONPATH=/app/lib:/app/none:$PYTHONPATH\nCMD uvicorn main:app\n"
    (tmp_path / "Dockerfile").write_text(lines)
    found = choose(tmp_path)
    assert found is not None
    assert found.folders == (tmp_path / "lib",)


@pytest.mark.parametrize("line", ["COPY backend/ .", "COPY ./backend /code/", "ADD backend ./"])
def test_the_app_is_in_the_folder_whose_files_are_copied_to_where_it_starts(
    tmp_path: Path, line: str
) -> None:
    put(tmp_path, "backend/app/main.py")
    lines = f"WORKDIR /code\n{line}\nCOPY --from=x out .\nCMD uvicorn app.main:app\n"
    (tmp_path / "Dockerfile").write_text(lines)
    found = choose(tmp_path)
    assert found is not None
    backend = tmp_path / "backend"
    assert (found.reference, found.folders, found.cwd) == ("app.main:app", (backend,), backend)


@pytest.mark.parametrize("name", ["dockerfile", "Containerfile", "docker/Dockerfile"])
def test_a_dockerfile_may_have_another_name(tmp_path: Path, name: str) -> None:
    put(tmp_path, "main.py")
    put(tmp_path, "app.py")
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("CMD uvicorn main:app\n")
    found = choose(tmp_path)
    assert found is not None
    assert found.reference == "main:app"


def test_a_package_is_imported_rather_than_the_module_beside_it(tmp_path: Path) -> None:
    put(tmp_path, "server.py", "")
    put(tmp_path, "server/__init__.py")
    assert choose(tmp_path, "server:app") == App(
        "server:app", f"{tmp_path}/openenv.yaml, line 2", fallback="server:app"
    )


@pytest.mark.parametrize(
    "text", ["", "def app(): ...\n", "class App: ...\n", "from x import *\ndef f(): FastAPI()\n"]
)
def test_a_folder_without_an_app_has_none(tmp_path: Path, text: str) -> None:
    put(tmp_path, "main.py", text)
    assert choose_app(tmp_path, None, "", {}) is None


BUILD = "def build():\n    pass\n"
ELSEWHERE: dict[str, tuple[dict[str, str], str | None]] = {
    "a keyword": (
        {"run.py": "import uvicorn\nuvicorn.run(app='web.api:app')\n"},
        "CMD python run.py",
    ),
    "a configuration": (
        {"run.py": "import uvicorn\nuvicorn.Server(uvicorn.Config('web.api:app')).run()\n"},
        "CMD python run.py",
    ),
    "a package": ({"pkg/__main__.py": "from web.api import app\n" + RUN}, "CMD python -m pkg"),
    "a package's own": (
        {"web/__main__.py": "from .api import app\n" + RUN, "web/__init__.py": ""},
        "CMD python -m web",
    ),
    "a variable": ({}, 'ENV PORT=80 APP="web.api:app"\nCMD uvicorn ${APP} --port $PORT'),
    "an argument": ({}, "ARG APP web.api:app\nCMD uvicorn $APP"),
    "a script's variable": (
        {"start.sh": 'export APP="${APP:-web.api:app}"\nexec uvicorn $APP\n'},
        "CMD bash start.sh",
    ),
    "a copied script": (
        {
            "etc/run.sh": "if [ $1 ]; then\n uvicorn other:app\nfi\nuvicorn web.api:app\n",
            "other.py": APP,
        },
        'WORKDIR /x\nCOPY etc/run.sh /usr/bin/begin\nENTRYPOINT ["begin"]',
    ),
    "a script copied to where it runs": (
        {"etc/run.sh": "exec uvicorn web.api:app\n"},
        'WORKDIR /x\nCOPY --chown=1:1 etc/run.sh ./go\nCMD ["./go"]',
    ),
    "a script": ({"run": "#!/usr/bin/env bash\nuvicorn web.api:app\n"}, 'ENTRYPOINT ["/app/run"]'),
    "a command": ({}, None),
    "no command": ({"openenv.yaml": "name: x\n"}, None),
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_an_app_is_found_as_its_author_starts_it(tmp_path: Path, kind: str) -> None:
    files, commands = ELSEWHERE[kind]
    reference = put(tmp_path, "web/api.py")
    for path, text in files.items():
        put(tmp_path, path, text)
    if commands is not None:
        (tmp_path / "Dockerfile").write_text(f"FROM x\n{commands}\n")
    scripts = {"server": "web.api:main"} if kind == "a command" else {}
    found = choose_app(tmp_path, None, "", scripts)
    assert found is not None
    assert found.reference == reference


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        (f"import uvicorn\n{BUILD}uvicorn.run(build())\n", "run:build()"),
        ("import uvicorn\nuvicorn.run('web:build', factory=True)\n", "web:build()"),
    ],
)
def test_a_function_that_makes_the_app_is_called(tmp_path: Path, text: str, reference: str) -> None:
    put(tmp_path, "web.py", BUILD)
    put(tmp_path, "run.py", text)
    assert starting(tmp_path, "CMD python run.py").reference == reference


def test_the_command_of_fastapi_finds_an_app_called_api(tmp_path: Path) -> None:
    put(tmp_path, "main.py")
    put(tmp_path, "backend/api.py", "api = FastAPI()\n")
    found = starting(tmp_path, 'CMD ["fastapi", "run", "backend/api.py"]')
    assert found.reference == "backend.api:api"


IN_MAIN = "app = None\ndef main():\n    app = FastAPI()\nmain()\n".replace("app = None\n", "")
UNSERVED: dict[str, tuple[dict[str, str], str | None, str, str]] = {
    "several": ({"web/api.py": APP, "other.py": APP}, None, "may be other:app or web.api:app",
                "`app: other:app`"),
    "one, unusual": ({"web/api.py": APP}, None, "may be web.api:app", "`app: web.api:app`"),
    "no Python": ({"server/app.py": "import os\napp = = FastAPI()\n"}, None,
                  "server/app.py, line 2: invalid syntax", "correct it"),
    "no Python, unusual": ({"web/api.py": "app = = FastAPI()\n"}, None,
                           "web/api.py, line 1: invalid syntax", "correct it"),
    "in a function": ({"main.py": IN_MAIN, "other.py": APP}, None,
                      "main.py, line 2: main() makes the app", "top of the file: `app = …`"),
    "started": ({"web/go.py": IN_MAIN, "Dockerfile": "CMD python web/go.py\n"}, None,
                "web/go.py, line 2: main() makes the app", "top of the file"),
    "returned": ({"main.py": "def build():\n    return create_app(Env)\n"}, "main:app",
                 "build() makes the app", "`app: main:build()`"),
    "in the block": ({"main.py": f"if __name__ == '__main__':\n    app = FastAPI()\n    {RUN}"},
                     "main:app", "the block of `__main__` makes the app", "top of the file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNSERVED)
def test_an_app_that_cannot_be_served_is_named_with_the_reason(tmp_path: Path, kind: str) -> None:
    files, named, why, hint = UNSERVED[kind]
    for path, text in files.items():
        put(tmp_path, path, text)
    with pytest.raises(UnknownSource) as refused:
        choose_app(tmp_path, named, "", {})
    assert why in refused.value.message
    assert hint in str(refused.value.hint)
