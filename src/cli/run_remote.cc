#include "cli/run_remote.h"

#include <fmt/format.h>

#include <sstream>

namespace paceline::cli {

std::string shell_quote(const std::string& text) {
  std::string quoted = "'";
  for (char c : text) {
    if (c == '\'') {
      quoted += "'\\''";
    } else {
      quoted += c;
    }
  }
  return quoted + "'";
}

std::string remote_script(const std::vector<std::pair<std::string, std::string>>& environment,
                          const std::vector<std::string>& unset, const std::string& directory,
                          const std::vector<std::string>& command) {
  std::string words;
  for (const auto& word : command) words += " " + shell_quote(word);
  std::string script;
  for (const auto& name : unset) script += fmt::format("unset {}\n", name);
  for (const auto& [name, value] : environment)
    script += fmt::format("export {}={}\n", name, shell_quote(value));
  script += fmt::format(
      "cd {0} || {{ echo \"paceline run: no directory \"{0}\" on $(uname -n)\" >&2; exit 126; }}\n",
      shell_quote(directory));
  // setsid makes the command the leader of a group of its own: kill -- -$child reaches all of it. What comes before
  // that finds no such group, and goes to the process that is about to lead it.
  // What a shell starts in the background ignores Ctrl-C, unless somebody undoes it.
  script +=
      "undo=; env --default-signal=INT,QUIT true 2>/dev/null && "
      "undo='env --default-signal=INT,QUIT'\n";
  script += fmt::format("setsid $undo{} </dev/null &\nchild=$!\n", words);
  script +=
      "exec 3<&0 </dev/null\n"
      "( trap '' TERM HUP INT\n"
      "  while read -r signal <&3; do\n"
      "    kill -s \"$signal\" -- -$child 2>/dev/null || kill -s \"$signal\" $child 2>/dev/null; "
      "done\n"
      "  kill -s TERM -- -$child 2>/dev/null; sleep 2; kill -s KILL -- -$child 2>/dev/null ) "
      ">/dev/null 2>&1 &\n"
      "watcher=$!\n"
      "exec 3<&-\n"
      "trap '' HUP TERM INT\n"
      "wait $child; code=$?\n"
      "kill -s KILL -- -$child 2>/dev/null\n"
      "kill -s KILL $watcher 2>/dev/null\n"
      "exit $code\n";
  return script;
}

std::vector<std::string> ssh_arguments(const std::string& agent, const std::string& host,
                                       std::size_t script_bytes) {
  std::vector<std::string> arguments;
  std::istringstream words(agent);
  for (std::string word; words >> word;) arguments.push_back(word);
  // BatchMode: an unknown key or a password is an error, not a question that nobody sees.
  for (const char* option :
       {"-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=10", "-T"}) {
    arguments.emplace_back(option);
  }
  arguments.push_back(host);
  // dd takes exactly the script off the stream, byte by byte: what follows are signals' names. The user's login
  // shell may be any: it sees one quoted word.
  arguments.push_back(
      fmt::format("exec /bin/sh -c 'eval \"$(dd bs=1 count={} 2>/dev/null)\"'", script_bytes));
  return arguments;
}

}  // namespace paceline::cli
