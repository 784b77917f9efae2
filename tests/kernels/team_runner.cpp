// The team of threads by itself: every item once whatever the phase, and no wait for a thread that the system stopped.

#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include <dirent.h>

#include "../../kernels/cpu/team.h"

using namespace arena;

namespace {

std::atomic<bool> stopped{false};
std::atomic<int> in_handler{0};

void hold(int) {
  in_handler++;
  while (stopped) usleep(100);
  in_handler--;
}

// As if no processor were left for them: they stay in a signal's handler.
int stop_helpers() {
  int count = 0;
  DIR* tasks = opendir("/proc/self/task");
  while (const dirent* task = readdir(tasks)) {
    const int id = std::atoi(task->d_name);
    if (id == 0 || id == getpid()) continue;
    syscall(SYS_tgkill, getpid(), id, SIGUSR1);
    count++;
  }
  closedir(tasks);
  while (in_handler < count) usleep(100);
  return count;
}

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::_Exit(1);
}

int run_phases(Team& team, int phases) {
  int by_helpers = 0;
  for (int phase = 0; phase < phases; phase++) {
    const int total = phase * 37 % 500, grain = 1 + phase % 7;
    std::vector<int> seen(total), threads(total);  // plain: whoever is done has told
    team.each(total, grain, [&](int thread, int64_t item, int64_t end) {
      require(end - item <= grain, "a chunk is larger than the grain");
      for (; item < end; item++) seen[item]++, threads[item] = thread;
    });
    for (int item = 0; item < total; item++) {
      require(seen[item] == 1, "an item was not done exactly once");
      by_helpers += threads[item] > 0;
    }
  }
  return by_helpers;
}

}  // namespace

int main(int, char** arguments) {
  signal(SIGUSR1, hold);
  const int threads = std::atoi(arguments[1]);
  Team team(threads);
  run_phases(team, 20000);
  stopped = true;
  require(stop_helpers() == threads - 1, "the helpers could not be stopped");
  require(run_phases(team, 2000) == 0, "a stopped thread did something");
  stopped = false;
  while (in_handler > 0) usleep(100);
  run_phases(team, 20000);
  for (int tries = 0; run_phases(team, 100) == 0; tries++) require(tries < 1000, "the helpers help no more");
  std::vector<int> many(300000);  // more than a run has numbers for
  team.each(many.size(), 1, [&](int, int64_t item, int64_t end) {
    for (; item < end; item++) many[item]++;
  });
  for (int count : many) require(count == 1, "an item of many was not done exactly once");
}
