"""A terminal of a chosen size, and what was drawn there."""

import fcntl
import os
import pty
import struct
import termios
import threading


class Terminal:
    """What is written to `output` reaches a real terminal; `text()` is all of it so far."""

    def __init__(self, columns=80, lines=24):
        self.reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.output = open(writer, "w")
        self.drawn = b""
        # A terminal that nobody reads is full after a few lines.
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self):
        while True:
            try:
                self.drawn += os.read(self.reader, 4096)
            except OSError:  # all writers have closed it
                return

    def text(self):
        """All that was drawn; the terminal is closed."""
        self.output.close()
        self.thread.join()
        return self.drawn.decode().replace("\r\n", "\n")
