#!/usr/bin/env bash
# Run a command, print what it is for and how long it took, and exit as it does: timed.sh WHAT COMMAND...
set -uo pipefail

what=$1 started=$SECONDS
shift
printf '==> %s\n' "$what"
"$@"
status=$?
verdict=$([ $status = 0 ] && echo "done" || echo "FAILED")
printf '==> %s: %s in %s s\n' "$what" "$verdict" $((SECONDS - started))
exit $status
