"""Text from files and servers on a terminal: signs that would control the terminal are written out."""

from typing import Any

ORDERS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Signs that turn the direction of text, so that it reads otherwise than it is."""
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
CONTROLS |= {code: f"\\u{code:04x}" for code in ORDERS}


def clean(text: str) -> str:
    """Text whose control signs are visible; line ends and tabs stay."""
    return text.translate(CONTROLS)


class Cleaned:
    """A text stream that cleans what is written to it.

    Consoles of rich write past it, since they control the terminal; `Screen` cleans what these print.

    Args:
        stream: Where the text goes.
        keep: Further control signs that stay: progress bars of other libraries need the carriage return.
    """

    def __init__(self, stream: Any, keep: str = ""):
        self.rich_proxied_file = stream
        self._controls = {code: seen for code, seen in CONTROLS.items() if chr(code) not in keep}

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(text.translate(self._controls))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)
