#!/bin/sh
# Prints TAP: a line for each test.
cd "$(dirname "$0")/.." || exit 1
tally="$PWD/tally"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
count=0
failed=0

# same NAME WANTED GOT
same() {
    count=$((count + 1))
    if [ "$2" = "$3" ]; then
        echo "ok $count - $1"
    else
        failed=1
        echo "not ok $count - $1"
        echo "# wanted: $2"
        echo "# got: $3"
    fi
}

cd "$work" || exit 1
printf 'a\nb\n' > two.txt
printf 'c\n' > one.txt

same "one file" "one.txt 1 total 1" "$("$tally" one.txt | tr '\n' ' ' | sed 's/ $//')"
same "two files" "two.txt 2 one.txt 1 total 3" "$("$tally" two.txt one.txt | tr '\n' ' ' | sed 's/ $//')"
same "no file" "total 0" "$("$tally")"

echo "1..$count"
exit $failed
