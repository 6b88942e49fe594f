"""The exceptions that mean "the user can fix this"."""


class ConfigurationError(ValueError):
    """An option, file or environment the user gave cannot work.

    The message is one sentence that names the option and the fix. The command line prints it without a
    traceback and exits with code 2; in Python it is an ordinary ``ValueError``.
    """
