// A rank on another host: what ssh is told, and what the remote shell is handed over its standard input. Nothing of
// the environment (the secret!) stands on a command line, where every user of a host could read it.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace paceline::cli {

/// 'it'\''s': one word for a POSIX shell.
std::string shell_quote(const std::string& text);

/// The script that the remote /bin/sh runs: changes to `directory`, sets `environment` without the names of `unset`, runs
/// `command` in a session of its own, and ends that whole session when standard input closes (the launcher or the
/// connection died) or when told to by a line with a signal's name.
std::string remote_script(const std::vector<std::pair<std::string, std::string>>& environment,
                          const std::vector<std::string>& unset, const std::string& directory,
                          const std::vector<std::string>& command);

/// ssh's arguments; the remote side reads `script_bytes` bytes of script from standard input. `agent` is the program,
/// with options: "ssh -p 2222".
std::vector<std::string> ssh_arguments(const std::string& agent, const std::string& host,
                                       std::size_t script_bytes);

}  // namespace paceline::cli
