#!/bin/sh
# The README's settings table is the program's own. TAP.
echo 1..1
sed -n '/<!-- settings/,/<!-- end of settings/p' README.md | sed '1d;$d' | sed '/^$/d' >"${TMPDIR:-/tmp}/bedside-readme.$$"
if "$BEDSIDE" help --markdown | sed '/^$/d' | cmp -s - "${TMPDIR:-/tmp}/bedside-readme.$$"; then
    echo "ok 1 - the_readme_has_every_setting_as_the_program_has_it"
else
    echo "not ok 1 - the_readme_has_every_setting_as_the_program_has_it"
    "$BEDSIDE" help --markdown | sed '/^$/d' | diff - "${TMPDIR:-/tmp}/bedside-readme.$$" | head -20 | sed 's/^/# /'
fi
rm -f "${TMPDIR:-/tmp}/bedside-readme.$$"
