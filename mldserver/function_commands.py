"""Carries out ``functions.COMMAND`` requests on the functions of a server, on its event loop.

    functions.stage     load the code at PATH in a fresh process; if it fits, store it, and note it as the staged version
    functions.deploy    run the staged version, or start an undeployed or failed function again
    functions.rollback  run the previous version
    functions.pause, functions.resume, functions.undeploy
    functions.export    return the function as a package, in base64
    functions.import    take the package at PATH: add its function, undeployed, with its code as the staged version

The argument is JSON (``Options``). Every change is one of ``FunctionLife``, in the function's ledger, so that a command to one server
reaches all servers of the function. Paths are those of the server's host.
"""

from __future__ import annotations

import base64
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from mldserver.assembly import store_of
from mldserver.base.clock import Clock
from mldserver.base.disk import sync
from mldserver.base.threads import run_in_daemon_thread
from mldserver.config.settings import Settings, functions_folder
from mldserver.errors import HandlerError, LedgerError, OperatorError
from mldserver.function import Function
from mldserver.functions.lifecycle import Command
from mldserver.functions.package import Package, own_settings, read_package, without_secrets
from mldserver.functions.probe import load_from, probe
from mldserver.handler.spec import HandlerSpec, windows_text
from mldserver.ledger.contract import CodeVersion, FunctionLife, Wanted
from mldserver.versions.archive import archive, unarchived
from mldserver.versions.code import pack, read_archive, store_code, unpack

PREFIX: Final = "functions."
_CHANGES: Final = {"pause", "resume", "undeploy"}
_VERSIONS: Final = {"deploy", "rollback"}
NAMES: Final = ("stage", "deploy", "rollback", "pause", "resume", "undeploy", "export", "import")
_PACKAGE_BYTES: Final = 40 << 20
"""The largest package that an answer of the admin endpoint carries."""

ReadSettings = Callable[[Mapping[str, Mapping[str, object]]], tuple[Settings, ...]]
"""Reads the settings of all functions again, with further tables of functions, as at the server's start. Raises ConfigError."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The argument of a command."""

    path: str = ""
    """``stage``: of the code; ``import``: of the package."""
    keep: bool = False
    """``undeploy``: keep positions, keyed state, timers and dead letters."""
    yes: bool = False
    """``stage``, ``deploy``, ``rollback``: accept that the version keeps state for a shorter time."""


class FunctionCommands:
    """Carries out the commands of one server."""

    def __init__(
        self,
        functions: Mapping[str, Function],
        clock: Clock,
        *,
        make: Callable[[Settings], Function],
        start: Callable[[Function], None],
        read_settings: ReadSettings | None,
    ) -> None:
        """Prepare commands on ``functions``.

        ``make`` returns a further function, and ``start`` runs it. ``read_settings``: None for a server that takes no packages.
        """
        self._functions = functions
        self._clock = clock
        self._make, self._start, self._read_settings = make, start, read_settings

    async def carry_out(self, name: str, argument: str, function: str) -> tuple[bool, str]:
        """Carry out a command on a function, or the only one; return whether it is done, and the result in words."""
        try:
            options = msgspec.json.decode(argument or "{}", type=Options)
            if name == "import":
                return True, await self._import(Path(options.path), yes=options.yes)
            return True, await self._carry_out(name, self._named(function), options)
        except msgspec.MsgspecError as error:
            return False, f"{argument!r:.100} is no argument of {PREFIX}{name}: {error}."
        except (OperatorError, HandlerError, LedgerError) as error:
            return False, str(error)

    def _named(self, name: str) -> Function:
        if not name and len(self._functions) == 1:
            (name,) = self._functions
        if name not in self._functions:
            raise OperatorError(
                f"This server has no function {name!r}." if name else "This server has several functions.",
                advice=f"There are {', '.join(self._functions)}.",
            )
        return self._functions[name]

    async def _carry_out(self, name: str, function: Function, options: Options) -> str:
        if name == "stage":
            spec = await load_from(function.settings, Path(options.path))
            return await self._stage(function, spec, pack(spec.code), yes=options.yes)
        if name == "export":
            return await self._export(function)
        if name in _VERSIONS:
            return await _change_version(function, Command(name), yes=options.yes)
        if name in _CHANGES:
            changed = await function.command(Command(name), keep=options.keep)
            return _told(function, Command(name), changed=changed)
        raise OperatorError(f"There is no command {name!r}.", advice=f"Commands are {', '.join(NAMES)}.")

    async def _stage(self, function: Function, spec: HandlerSpec, code: bytes, *, yes: bool) -> str:
        """Store code whose handler was loaded, and note it as the staged version. Raises OperatorError if it does not fit."""
        life = (await function.read_state()).life
        if function.parts is not None:
            function.parts.swap.require_fit(spec, accept_shorter_ttl=yes)
        version = await self._stored(function.settings, spec, code)
        if version.path == life.deployed.path:
            return f"The function {function.name} runs this code already: {version.id}."
        await function.change_life(life, replace(life, other=version, other_is_previous=False))
        return (
            f"Version {version.id} of {function.name} is staged. `mldserver functions deploy {function.name}` runs it in place of "
            f"{_named_version(life.deployed)}."
        )

    async def _stored(self, settings: Settings, spec: HandlerSpec, code: bytes) -> CodeVersion:
        def store() -> str:
            return store_code(store_of(settings), code)

        try:
            path = await run_in_daemon_thread(store, name="mldserver-code")
        except OSError as error:
            raise OperatorError(
                f"The code cannot be stored in {settings.out}: {error.strerror or error}.",
                did="Nothing has changed.",
                advice="Check the folder, its rights and the room on its disk.",
            ) from error
        return CodeVersion(spec.version, path, self._clock.now_ms())

    async def _export(self, function: Function) -> str:
        settings, life = function.settings, (await function.read_state()).life
        spec, code = await _load(settings, life.deployed)
        data = Package(
            name=function.name,
            handler=settings.handler,
            version=spec.version,
            schema="" if spec.schema is None else spec.schema.ddl,
            windows=windows_text(spec.windows),
            settings=without_secrets(function.name, own_settings(settings)),
            code=unarchived(code or pack(spec.code), function.name),
        ).packed()
        if len(data) > _PACKAGE_BYTES:
            raise OperatorError(
                f"The package would have {len(data):,} bytes; {_PACKAGE_BYTES:,} are allowed.",
                advice="Leave modules with data out of the handler's package.",
            )
        return base64.b64encode(data).decode()

    async def _import(self, path: Path, *, yes: bool) -> str:
        """Take a package. A function that is new is added, undeployed; of another only the code is staged."""
        package = await run_in_daemon_thread(partial(_package_at, path), name="mldserver-code")
        function, data = self._functions.get(package.name), archive(package.code)
        if function is not None:
            _require_same_settings(function, package)
            spec = await probe(function.settings, unpack(data, f"{path}"))
            return await self._stage(function, spec, data, yes=yes)
        if self._read_settings is None:
            raise OperatorError("This server takes no functions from packages.")
        table = tomllib.loads(package.settings_file())
        read = partial(self._read_settings, {package.name: table})
        every = {each.pipeline: each for each in await run_in_daemon_thread(read, name="mldserver-settings")}
        settings = every[package.name]
        spec = await probe(settings, unpack(data, f"{path}"))
        function = self._make(settings)
        state = await function.read_state()
        if state.life.wanted is not Wanted.UNDEPLOYED and (state.shards or state.windows or state.servers):
            raise OperatorError(
                f"The ledger of {package.name} in {settings.out} is in use: a function of that name is deployed, or was.",
                did="Nothing has changed.",
                advice="Give the function another folder (out), or undeploy the other one first.",
            )
        version = await self._stored(settings, spec, data)
        undeployed = FunctionLife(Wanted.UNDEPLOYED, deployed=version, keep=state.life.keep)
        # The ledger comes first: a server that starts once the file is there finds the function undeployed.
        await function.change_life(state.life, undeployed)
        write = partial(_write_settings, settings, package)
        file = await run_in_daemon_thread(write, name="mldserver-settings")
        self._start(function)
        return (
            f"The function {package.name} is here, undeployed; its settings are in {file}. `mldserver functions deploy "
            f"{package.name}` starts it with version {version.id}."
        )


async def _change_version(function: Function, command: Command, *, yes: bool) -> str:
    """Deploy the staged or the previous version, once it was seen to fit; or start a function again."""
    name, parts = function.name, function.parts
    before, after = await function.plan(command)
    if after is None:
        return (
            f"Nothing is staged: the function {function.name} goes on with {_named_version(before.deployed)}."
        )
    is_other = after.deployed != before.deployed
    if is_other and parts is not None:
        spec, _ = await _load(function.settings, after.deployed)
        parts.swap.require_fit(spec, accept_shorter_ttl=yes)
    await function.change_life(before, after)
    if parts is None:
        return f"The function {name} starts with {_named_version(after.deployed)}; `mldserver functions list` shows its state."
    if is_other:
        await parts.swap.reach(after.deployed)
    return (
        f"The function {name} runs {_named_version(after.deployed)}. `mldserver functions rollback {name}` goes back to "
        f"{_named_version(before.deployed)}."
    )


_EFFECTS: Final = {
    Command.PAUSE: "its daemons wait and keep their leases",
    Command.RESUME: "its shards go on",
    Command.UNDEPLOY: "its servers stop reading, its windows are published, and {}",
}
_FORGETS: Final = {
    False: "then its positions, keyed state, timers and dead letters are deleted",
    True: "its positions, keyed state, timers and dead letters are kept",
}


def _told(function: Function, command: Command, *, changed: bool) -> str:
    """Return what a command did, as a sentence."""
    state = f"The function {function.name} is {function.shown}"
    if not changed:
        return f"{state}: nothing was to be done."
    return f"{state}: {_EFFECTS[command].format(_FORGETS[function.life.keep])}."


def _named_version(version: CodeVersion) -> str:
    return f"version {version.id}" if version.path else "the code on the Python path"


async def _load(settings: Settings, version: CodeVersion) -> tuple[HandlerSpec, bytes | None]:
    """Load a version's handler in a fresh process; return its spec and its archive, if it has one.

    Raises HandlerError, or OperatorError if the archive cannot be read.
    """
    if not version.path:
        return await probe(settings), None

    def read() -> bytes:
        return read_archive(store_of(settings), version.path)

    data = await run_in_daemon_thread(read, name="mldserver-code")
    return await probe(settings, unpack(data, f"/{version.path}")), data


def _package_at(path: Path) -> Package:
    """Return the package in a file. Blocking. Raises OperatorError."""
    try:
        return read_package(path.read_bytes(), f"{path}")
    except OSError as error:
        raise OperatorError(
            f"The package {path} cannot be read: {error.strerror}.",
            advice="Put it where the server's user may read it, on the server's host.",
        ) from error


def _require_same_settings(function: Function, package: Package) -> None:
    """Raise OperatorError if a package has other settings than the function that it names."""
    own = without_secrets(function.name, own_settings(function.settings)) | {
        "handler": function.settings.handler
    }
    new = {**package.settings, "handler": package.handler}
    if differ := sorted(key for key in {*own, *new} if own.get(key) != new.get(key)):
        raise OperatorError(
            f"The function {function.name} is here with other settings: {', '.join(differ)}.",
            did="Nothing has changed.",
            advice="Change its settings in the file and restart the server, or import the package on another server. "
            f"`mldserver functions diff {function.name} FILE` shows the differences.",
        )


def _write_settings(settings: Settings, package: Package) -> Path:
    """Write a function's settings as a file of their own, in one step, and return its path. Blocking. Raises OperatorError."""
    assert settings.file is not None, "resolved settings know their file"
    file = functions_folder(settings.file) / f"{package.name}.toml"
    part = file.with_suffix(".part")
    try:
        file.parent.mkdir(exist_ok=True)
        part.write_text(package.settings_file(), "utf-8")
        sync(part)
        part.replace(file)
        sync(file.parent)
    except OSError as error:
        raise OperatorError(
            f"The settings {file} cannot be written: {error.strerror}.",
            did="The function was not added.",
            advice="Let the server's user write into the folder, then import the package again.",
        ) from error
    return file
