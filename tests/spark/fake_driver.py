"""A driver that does as it is told by its first argument: for the engine's own tests. Speaks the real wire."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from mldserver.children.channel import receive_now, send_now
from mldserver.spark import driver_messages


class FakeDriver:
    def __init__(self, script: str, state: Path, sock: socket.socket) -> None:
        self.script = script
        self.sock = sock
        self.starving: list[int] = []
        self.deaf: set[int] = set()
        self.failed_once = False
        with state.open("a") as lives:
            lives.write(f"{os.getpid()}\n")
        self.life = len(state.read_text().split())

    def send(self, *messages: driver_messages.Message) -> None:
        for message in messages:
            send_now(self.sock, message)

    def serve(self) -> None:
        while messages := receive_now(self.sock, driver_messages.FromServer):
            for message in messages:
                self.take(message)

    def take(self, message: driver_messages.Message) -> None:
        match message:
            case driver_messages.StartSession():
                self.begin(message)
            case driver_messages.LoadFunction():
                self.load(message)
            case driver_messages.RunWindows() if message.jobs[1:]:
                self.run_group(message)
            case driver_messages.RunWindows():
                self.run(message)
            case driver_messages.CancelJob() if self.script != "deaf" and message.id not in self.deaf:
                self.send(driver_messages.FailedJob(message.id, "Cancelled", "cancelled", cancelled=True))
            case driver_messages.Stop() if self.script == "trains":
                archive = next(arg for arg in sys.argv if arg.startswith("archive="))
                Path(archive.removeprefix("archive=")).write_text("classes")
                os._exit(0)
            case driver_messages.Stop() if self.script != "stubborn":
                print("stopping in order")
                sys.stdout.flush()
                os._exit(0)

    def begin(self, start: driver_messages.StartSession) -> None:
        assert Path(start.scratch).is_dir()
        (Path(start.scratch) / "spill").write_text("x")
        if self.script == "silent":
            return
        if self.script in {"dies at once", "dies first"} and (
            self.life == 1 or self.script == "dies at once"
        ):
            print("java: command not understood", file=sys.stderr)
            sys.stderr.flush()
            os._exit(3)
        if self.script == "killed, then fails" and self.life == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.script == "killed, then fails":
            self.script = "fails:spark"
        if self.script.startswith("fails to start:"):
            fault = self.script.removeprefix("fails to start:")
            self.send(driver_messages.StartFailed(fault, "SomeError", "no session", "Traceback …"))
            os._exit(1)
        if self.script == "stubborn":
            subprocess.Popen(["sleep", "600"])
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.start = start
        self.send(driver_messages.Started("4.3.0", "http://ui", os.getpid()))

    def load(self, load: driver_messages.LoadFunction) -> None:
        if self.script == "silent":
            return
        # A module "plan" says what becomes of its function.
        plan = load.code.get("plan", ("", b""))[1].decode()
        if plan.startswith("waits:"):
            while not Path(plan.removeprefix("waits:")).exists():
                time.sleep(0.01)
        if plan == "fails once" and not self.failed_once:
            self.failed_once = True
            self.send(driver_messages.LoadFailed(load.name, "spark", "SomeError", "no room"))
            return
        if plan == "dies":
            os._exit(7)
        if plan == "lacks executors":
            self.send(driver_messages.Health("No executors."))
            return
        if (plan or self.script).startswith("fails:"):
            fault, _, error = (plan or self.script).removeprefix("fails:").partition(":")
            said = (fault, error or "SomeError", "no session", "Traceback …")
            self.send(driver_messages.LoadFailed(load.name, *said))
            return
        if self.script == "says all it knows":
            told = f"{self.start!r} {load!r}"
            self.say(told, self.start, load)
            self.send(driver_messages.Log("warning", f"log {told}"))
            if self.life == 1:
                said = ("spark", "SomeError", f"no {told}", f"at {told}")
                self.send(driver_messages.LoadFailed(load.name, *said))
                return
        self.loaded = load
        self.send(driver_messages.FunctionLoaded(load.name))

    def say(self, said: str, start: driver_messages.StartSession, load: driver_messages.LoadFunction) -> None:
        """Print it in every way that Spark and users' code have."""
        print("printed", said)
        entry = {"level": "WARN", "logger": "a.B", "msg": f"msg {said}", "exception": f"stack {said}"}
        print("plain", said, json.dumps(entry), sep="\n", file=sys.stderr)
        for pairs in (start.conf, load.sink.options if load.sink else {}):
            print(*pairs.items(), sep="\n", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()

    def run(self, run: driver_messages.RunWindows) -> None:
        name = run.job.window.id
        if name == "fails":
            self.send(
                driver_messages.FailedJob(run.id, "ValueError", "no good", "File my.py", advice="Remove it.")
            )
        elif name == "dies":
            os._exit(9)
        elif name == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif name.startswith("slow"):
            self.say_slow(run, name)
        elif name == "floods":
            for stream in (sys.stdout, sys.stderr):
                print(*range(5000), sep="\n", file=stream, flush=True)
            self.send(driver_messages.JobDone(run.id, (driver_messages.Output((), 0),)))
        elif name.startswith("forks"):
            self.fork(leave=name == "forks away")
        elif name == "tells":
            told = f"{self.start!r} {self.loaded!r}"
            self.say(told, self.start, self.loaded)
            failed = driver_messages.FailedJob(run.id, "ValueError", f"f {told}", f"at {told}")
            self.send(driver_messages.Health(f"No {told}."), failed)
        elif name == "jvm dies":
            self.send(driver_messages.JvmGone(-9))
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "needs memory":
            self.send(driver_messages.JvmGone(3))
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "starves":
            self.starving.append(run.id)
            self.send(driver_messages.Health("No executors."))
        elif name == "feeds":
            done = (driver_messages.Output((), 0),)
            # Their answers first: from Health on a deadline counts, which a slow machine may not keep.
            self.send(*(driver_messages.JobDone(starved, done) for starved in self.starving))
            self.send(driver_messages.Health(""), driver_messages.JobDone(run.id, done))
        elif name == "is forgotten":
            self.send(driver_messages.Health("The master has forgotten us.", over=True))
            os._exit(1)
        elif name == "garbage":
            self.sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        elif name == "wrong":
            self.send(driver_messages.Stop())
        elif name == "talks":
            self.send(
                driver_messages.HookSlow(999, "of a job that was cancelled", 60.0, ""),
                driver_messages.Log("warning", "careful"),
            )
            print("printed by the user")
            print('{"level": "WARN", "logger": "a.B", "msg": "told by Spark"}', file=sys.stderr)
            print("no line end", file=sys.stderr, end="")
            os.close(1)
            os.close(2)
            self.send(driver_messages.JobDone(run.id, (driver_messages.Output((), 0),)))
        elif name == "hangs for good":
            self.deaf.add(run.id)
        elif name != "hangs":
            self.send(
                driver_messages.JobDone(999, ()),
                driver_messages.JobDone(
                    run.id, (driver_messages.Output((f"{name}.parquet",), run.job.rows),)
                ),
            )

    def fork(self, *, leave: bool) -> None:
        """Die, and leave a child that holds the socket: in the group, or out of it."""
        child = os.fork()
        if not child:
            if leave:
                os.setsid()
            os.close(1)
            os.close(2)
            signal.alarm(600)  # nobody else ends it, should the test fail
            signal.pause()
        if leave:
            while os.getsid(child) != child:  # until then it would be killed with this group
                time.sleep(0.01)
            print(f"away {child}", flush=True)
        os._exit(9)

    def say_slow(self, run: driver_messages.RunWindows, name: str) -> None:
        line = "my.py:7, in on_window: wait()"
        if name == "slow for want of executors":
            self.send(driver_messages.Health("No executors."))
        self.send(driver_messages.HookSlow(run.id, name, 60.0, line))
        if name == "slow for want of executors":
            self.send(driver_messages.JobDone(run.id, (driver_messages.Output((), 0),)))

    def run_group(self, run: driver_messages.RunWindows) -> None:
        names = {job.window.id for job in run.jobs}
        if "fails" in names:
            self.send(driver_messages.FailedJob(run.id, "ValueError", "no good", "File my.py"))
        elif "dies" in names:
            os._exit(9)
        elif "slow" in names:
            self.say_slow(run, "slow")
        elif "hangs" not in names:
            outputs = tuple(
                driver_messages.Output((f"{job.window.id}.parquet",), job.rows) for job in run.jobs
            )
            self.send(driver_messages.JobDone(run.id, outputs))


if __name__ == "__main__":
    fd = int(sys.argv[-1])
    FakeDriver(sys.argv[1], Path(sys.argv[2]), socket.socket(fileno=fd)).serve()
