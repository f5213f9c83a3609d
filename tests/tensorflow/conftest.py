import signal

# What started the tests may ignore Ctrl-C (a shell does, of what it puts in the background); ranks inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
