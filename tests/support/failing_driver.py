"""A driver that speaks the real wire, computes with pyarrow, and fails as a plan says: ``fail,die,ok`` for three jobs.

    fail    the job fails                       hang    it never ends, but lets itself be cancelled
    die     the process dies under it           deaf    it never ends, whatever it is told
    jvm     its JVM dies, and takes it along    full    the output disk is full in the middle of the output
    stay    as deaf, and it does not stop when it is told to
    forget  the master does not know it any more: it says so, and ends

A handler whose name ends with ``_refused`` cannot be loaded. After the plan every job succeeds; with ``…`` at its end the last one is repeated for ever. How far the plan is, is kept
in a file, over the lives of the drivers.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from mldserver.children.channel import receive_now, send_now
from mldserver.errors import WindowFailed
from mldserver.spark import driver_messages
from mldserver.testing.stand_ins import _compute, _file

DEAF = {"deaf", "stay"}


class FailingDriver:
    def __init__(self, plan: str, state: Path, sock: socket.socket) -> None:
        self.repeats = plan.endswith("…")
        self.plan = plan.removesuffix("…").split(",")
        self.state = state
        self.sock = sock
        self.last = ""

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
                self.send(driver_messages.Started("4.3.0", None))
            case driver_messages.LoadFunction() if message.handler.endswith("_refused"):
                said = ("handler", "HandlerInvalid", "the driver cannot import it")
                self.send(driver_messages.LoadFailed(message.name, *said))
            case driver_messages.LoadFunction():
                self.send(driver_messages.FunctionLoaded(message.name))
            case driver_messages.RunWindows() if self.last not in DEAF:  # its one thread is never free again
                self.run(message, self.next())
            case driver_messages.CancelJob():
                if self.last not in DEAF:
                    self.send(
                        driver_messages.FailedJob(
                            message.id, "Cancelled", "It was cancelled.", cancelled=True
                        )
                    )
            case driver_messages.Stop() if self.last != "stay":
                print("stopping in order", flush=True)
                os._exit(0)

    def next(self) -> str:
        with self.state.open("a") as file:
            file.write("x")
        number = self.state.stat().st_size
        if number <= len(self.plan):
            self.last = self.plan[number - 1]
        else:
            self.last = self.plan[-1] if self.repeats else "ok"
        return self.last

    def run(self, run: driver_messages.RunWindows, what: str) -> None:
        match what:
            case "fail":
                self.send(driver_messages.FailedJob(run.id, "ValueError", "no good", "File my.py"))
            case "full":
                staging = Path(run.job.staging)
                staging.mkdir(parents=True)
                (staging / "part-00000-half.parquet").write_bytes(b"PAR1 half a file")
                self.send(driver_messages.FailedJob(run.id, "IOException", "No space left on device"))
            case "die":
                os._exit(9)
            case "forget":
                self.send(driver_messages.Health("The master has forgotten it.", over=True))
                os._exit(1)
            case "jvm":
                self.send(driver_messages.JvmGone(-9))
                os.kill(os.getpid(), signal.SIGKILL)
            case "ok":
                try:
                    outputs = tuple(
                        driver_messages.Output((_file(job),), _compute(job, None, None)) for job in run.jobs
                    )
                except WindowFailed as error:
                    self.send(driver_messages.FailedJob(run.id, type(error).__name__, str(error)))
                else:
                    self.send(driver_messages.JobDone(run.id, outputs))


if __name__ == "__main__":
    fd = int(sys.argv[-1])
    FailingDriver(sys.argv[1], Path(sys.argv[2]), socket.socket(fileno=fd)).serve()
