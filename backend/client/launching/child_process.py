"""Ends processes that were started here, and no others."""

import subprocess

#: An agent needs this long at most to end ranks that hang.
END_SECONDS = 8.0


def end_process(process: subprocess.Popen, seconds: float):
    """Ask a process to end unless it has, and kill it after so many ``seconds``."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
