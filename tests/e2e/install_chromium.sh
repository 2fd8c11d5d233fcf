#!/usr/bin/env bash
# Makes sure that a Chromium is there for the page's test; installs Debian's headless one where it is not. Safe to repeat.
set -euo pipefail

for name in chromium-headless-shell chromium chromium-browser google-chrome; do
  if path=$(command -v "$name"); then
    echo "chromium: $path is here, nothing to install"
    exit 0
  fi
done

by_hand="install chromium or google-chrome by hand (Debian: apt-get install chromium-headless-shell; macOS: brew install --cask google-chrome) and run again"
if ! command -v apt-get > /dev/null; then
  if [ -d "/Applications/Google Chrome.app" ]; then
    echo "chromium: Google Chrome is here, nothing to install"
    exit 0
  fi
  echo "chromium: not found, and this machine has no apt-get: $by_hand" >&2
  exit 1
fi
as_root=()
if [ "$(id -u)" != 0 ]; then
  if ! sudo -n true 2> /dev/null; then
    echo "chromium: not found, and installing it needs root: $by_hand" >&2
    exit 1
  fi
  as_root=(sudo -n)
fi

# Ubuntu's `chromium` is a snap and has no headless shell; there the last resort is what the error says.
package=chromium-headless-shell
echo "chromium: installing $package with its fonts, once (100 MB)"
export DEBIAN_FRONTEND=noninteractive
quiet=(-qq -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=120)
if ! { "${as_root[@]}" apt-get update "${quiet[@]}" &&
  "${as_root[@]}" apt-get install -y --no-install-recommends "${quiet[@]}" "$package" fonts-dejavu-core; } > /dev/null; then
  echo "chromium: apt-get could not install $package: $by_hand" >&2
  exit 1
fi
command -v "$package" > /dev/null
