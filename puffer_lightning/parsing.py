"""What is wrong with a command line, in one sentence."""

import difflib
import re
import sys
from typing import NoReturn

from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override


class Parser(LightningArgumentParser):
    """Lightning's parser, which says what is wrong in one sentence instead of after a page of usage."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        print(f"error: {one_sentence(message, parser)}", file=sys.stderr)
        print(f"Run {parser.prog.replace(' [options]', '')} --help for all options.", file=sys.stderr)
        sys.exit(2)


def one_sentence(message: str, parser: LightningArgumentParser) -> str:
    """Say what jsonargparse says, in one sentence that names the option.

    Args:
        message: Of an exception of jsonargparse's.
        parser: Knows the options there are.
    """
    if unknown := re.search(r"unrecognized arguments: --([^\s=]+)|not accept option '(\S+)'", message, re.I):
        name = unknown[1] or unknown[2]
        known = [option[2:] for action in parser._actions for option in action.option_strings]
        closest = difflib.get_close_matches(name, known, n=1)
        return f"there is no option --{name}" + (f": did you mean --{closest[0]}?" if closest else ".")
    keys = list(re.finditer(r'Parser key "(\S+)":?', message))
    option = "--" + ".".join(key[1] for key in keys)
    owner = re.search(r"class_path(?:=| )'([\w.]+)'", message)
    if owner and (refused := re.search(r"Option '(\S+)' is not accepted", message)):
        return (
            f"{option}: {owner[1]} has no option {refused[1]}; {option}.help {owner[1]} lists those it has."
        )
    if owner and (missing := re.search(r"arguments are required: (.+)", message)):
        return f"{option}: {owner[1]} needs {missing[1]}."
    given = re.findall(r"(?:Given|Got) value: (.+?)(?:\. Got value.*)?$", message, re.MULTILINE)
    message = message[keys[-1].end() :].strip() if keys else message
    message = re.sub(r"Type .+ expects a function or a callable class: |(?<=:)\n\s+(?!-|\s)", " ", message)
    # Not the parser's own words on what it tried, nor its list of how a class may be given.
    pattern = r"- *((?!Does not validate|Expected a path|Not a valid|an? )\S.+?)(?:\. Got value.*)?$"
    reasons = dict.fromkeys(re.findall(pattern, message, re.MULTILINE))
    if keys and message.startswith("Expected"):
        message = message.partition("\n")[0].partition(". Got value: Namespace")[0]
    elif telling := [reason for reason in reasons if not reason.startswith("Expected")]:
        message = "; or ".join(telling)
    elif reasons:
        message = "; or ".join(reasons) + (f" (given: {given[-1]})" if given else "")
    message = re.sub(r"<class '([\w.]+)'>|typing\.(?=Literal)", r"\1", " ".join(message.split()))
    return f"{option}: {message}" if keys else message
