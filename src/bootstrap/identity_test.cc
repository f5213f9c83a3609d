#include "bootstrap/identity.h"

#include <gtest/gtest.h>

#include <map>

namespace paceline::bootstrap {
namespace {

Environment environment(std::map<std::string, std::string> variables) {
  return [variables](const std::string& name) -> std::optional<std::string> {
    auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  };
}

Result<Identity> find(std::map<std::string, std::string> variables, bool torch_first = true) {
  return find_identity(std::nullopt, std::nullopt, torch_first, environment(std::move(variables)));
}

TEST(Identity, AProcessOnItsOwnIsAJobOfOne) {
  auto found = find({});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->size, 1);
  EXPECT_EQ(found->launcher, Launcher::kNone);
}

TEST(Identity, TorchrunAndItsRestarts) {
  std::map<std::string, std::string> variables{{"RANK", "5"},
                                               {"WORLD_SIZE", "8"},
                                               {"LOCAL_RANK", "1"},
                                               {"LOCAL_WORLD_SIZE", "4"},
                                               {"MASTER_ADDR", "node-a"},
                                               {"TORCHELASTIC_RUN_ID", "abc"},
                                               {"TORCHELASTIC_RESTART_COUNT", "0"}};
  auto first = find(variables);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->rank, 5);
  EXPECT_EQ(first->size, 8);
  EXPECT_EQ(first->local_rank, 1);
  EXPECT_EQ(first->master_host, "node-a");
  variables["TORCHELASTIC_RESTART_COUNT"] = "1";
  auto second = find(variables);
  ASSERT_TRUE(second);
  EXPECT_EQ(first->job, second->job) << "an agent's own count, another on each node";
}

TEST(Identity, MpiLaunchers) {
  auto open_mpi = find({{"OMPI_COMM_WORLD_RANK", "3"},
                        {"OMPI_COMM_WORLD_SIZE", "4"},
                        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  ASSERT_TRUE(open_mpi);
  EXPECT_EQ(open_mpi->launcher, Launcher::kOpenMpi);
  EXPECT_EQ(open_mpi->rank, 3);
  auto hydra =
      find({{"PMI_RANK", "2"}, {"PMI_SIZE", "3"}, {"PMI_FD", "7"}, {"MPI_LOCALRANKID", "0"}});
  ASSERT_TRUE(hydra);
  EXPECT_EQ(hydra->launcher, Launcher::kHydra);
  EXPECT_EQ(hydra->rank, 2);
}

TEST(Identity, WhichLauncherWinsIsASetting) {
  std::map<std::string, std::string> both{{"RANK", "0"},
                                          {"WORLD_SIZE", "1"},
                                          {"OMPI_COMM_WORLD_RANK", "3"},
                                          {"OMPI_COMM_WORLD_SIZE", "4"}};
  auto torch = find(both, true);
  auto mpi = find(both, false);
  ASSERT_TRUE(torch && mpi);
  EXPECT_EQ(torch->launcher, Launcher::kTorch);
  EXPECT_EQ(mpi->launcher, Launcher::kOpenMpi);
}

TEST(Identity, SlurmTellsRankZerosHost) {
  std::map<std::string, std::string> variables{{"SLURM_PROCID", "4"},
                                               {"SLURM_NTASKS", "99"},
                                               {"SLURM_STEP_NUM_TASKS", "6"},
                                               {"SLURM_LOCALID", "0"},
                                               {"SLURM_JOB_ID", "17"},
                                               {"SLURM_STEP_ID", "2"},
                                               {"SLURM_STEP_NODELIST", "gpu[07-09],login"}};
  auto found = find(variables);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->size, 6) << "the step's tasks, not the allocation's";
  EXPECT_EQ(found->master_host, "gpu07");
  EXPECT_NE(found->job.find("17"), std::string::npos);
  variables.erase("SLURM_STEP_ID");
  auto batch = find(variables);
  ASSERT_TRUE(batch);
  EXPECT_EQ(batch->size, 1) << "a batch script was not started by srun";
}

TEST(Identity, SlurmTellsTheTasksOfANode) {
  std::map<std::string, std::string> variables{{"SLURM_PROCID", "5"},
                                               {"SLURM_STEP_NUM_TASKS", "7"},
                                               {"SLURM_LOCALID", "1"},
                                               {"SLURM_NODEID", "2"},
                                               {"SLURM_STEP_ID", "0"},
                                               {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
                                               {"SLURM_STEP_NODELIST", "n[1-4]"}};
  auto found = find(variables);
  ASSERT_TRUE(found) << found.status().message();
  EXPECT_EQ(found->local_rank, 1);
  EXPECT_EQ(found->local_size, 2);
  EXPECT_EQ(found->master_host, "n1");
  variables["SLURM_STEP_TASKS_PER_NODE"] = "2(x3";
  auto wrong = find(variables);
  ASSERT_FALSE(wrong);
  EXPECT_NE(wrong.status().message().find("SLURM_STEP_TASKS_PER_NODE"), std::string::npos);
  variables.erase("SLURM_STEP_TASKS_PER_NODE");
  EXPECT_EQ(find(variables)->local_size, 0) << "not told";
  variables["SLURM_TASKS_PER_NODE"] = "4(x4)";
  EXPECT_EQ(find(variables)->local_size, 4);
}

TEST(Identity, OneHostOfSlurmNeedsNoName) {
  auto found = find({{"SLURM_PROCID", "0"},
                     {"SLURM_STEP_NUM_TASKS", "4"},
                     {"SLURM_LOCALID", "0"},
                     {"SLURM_NODEID", "0"},
                     {"SLURM_STEP_ID", "0"},
                     {"SLURM_STEP_TASKS_PER_NODE", "4"},
                     {"SLURM_STEP_NODELIST", "gpu07"}});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->local_size, 4);
  EXPECT_EQ(found->master_host, "127.0.0.1");
}

// srun --mpi=pmi2 sets PMI's variables but MPICH's for the place in the node.
TEST(Identity, SlurmsPmi2HasAPlaceInTheNodeToo) {
  std::map<std::string, std::string> variables{
      {"PMI_FD", "7"},        {"PMI_RANK", "3"},
      {"PMI_SIZE", "4"},      {"SLURM_PROCID", "3"},
      {"SLURM_LOCALID", "1"}, {"SLURM_NODEID", "1"},
      {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"}};
  auto found = find(variables);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->launcher, Launcher::kHydra);
  EXPECT_EQ(found->local_rank, 1);
  EXPECT_EQ(found->local_size, 2);
  variables["MPI_LOCALRANKID"] = "0";  // Hydra's own word wins
  EXPECT_EQ(find(variables)->local_rank, 0);
}

TEST(Identity, ContradictionsAreNamed) {
  struct Case {
    std::map<std::string, std::string> variables;
    const char* names;
  };
  for (const auto& c :
       {Case{{{"RANK", "1"}}, "WORLD_SIZE"}, Case{{{"RANK", "4"}, {"WORLD_SIZE", "4"}}, "RANK"},
        Case{{{"RANK", "x"}, {"WORLD_SIZE", "4"}}, "RANK='x'"},
        Case{{{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE"},
        Case{{{"OMPI_COMM_WORLD_SIZE", "2"}}, "OMPI_COMM_WORLD_RANK"},
        Case{{{"PACELINE_RANK", "-2"}, {"PACELINE_SIZE", "2"}}, "PACELINE_RANK"},
        Case{{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "3"}, {"LOCAL_WORLD_SIZE", "2"}},
             "LOCAL_RANK"}}) {
    auto found = find(c.variables);
    ASSERT_FALSE(found);
    EXPECT_EQ(found.status().code(), Code::kInvalidArgument);
    EXPECT_NE(found.status().message().find(c.names), std::string::npos)
        << found.status().message();
  }
  EXPECT_FALSE(find_identity(1, std::nullopt, true, environment({})));
  EXPECT_FALSE(find_identity(2, 2, true, environment({})));
  EXPECT_FALSE(find_identity(0, 0, true, environment({})));
}

TEST(Identity, ExplicitRankAndSizeWin) {
  auto found = find_identity(1, 3, true, environment({{"RANK", "7"}, {"WORLD_SIZE", "8"}}));
  ASSERT_TRUE(found);
  EXPECT_EQ(found->rank, 1);
  EXPECT_EQ(found->size, 3);
}

TEST(NodeList, Expands) {
  auto names = expand_nodelist("n[1-3,07],login,r[1-2]c[08-10]x");
  ASSERT_TRUE(names) << names.status().message();
  EXPECT_EQ(*names, (std::vector<std::string>{"n1", "n2", "n3", "n07", "login", "r1c08x", "r1c09x",
                                              "r1c10x", "r2c08x", "r2c09x", "r2c10x"}));
}

TEST(NodeList, TasksOfANode) {
  const std::string text = "2(x3),1,16(x2)";
  for (std::size_t node : {0, 1, 2}) EXPECT_EQ(*tasks_on_node(text, node), 2);
  EXPECT_EQ(*tasks_on_node(text, 3), 1);
  EXPECT_EQ(*tasks_on_node(text, 5), 16);
  EXPECT_FALSE(tasks_on_node(text, 6));
  for (const char* bad :
       {"", "x", "2(", "2(x", "2(x0)", "2(xa)", "2(x3)4", "-1", "2,,1", "99999999999"})
    EXPECT_FALSE(tasks_on_node(bad, 5)) << bad;
}

TEST(NodeList, RefusesWhatItCantRead) {
  for (const char* text :
       {"n[1-", "n]1", "n],m[1]", "n[3-1]", "n[a]", "a,,b", "", "n[1-99999999]"}) {
    auto names = expand_nodelist(text, 1000);
    EXPECT_FALSE(names) << text;
  }
}

TEST(NodeIdentity, IsStableAndNotEmpty) {
  EXPECT_FALSE(node_identity().empty());
  EXPECT_EQ(node_identity(), node_identity());
}

}  // namespace
}  // namespace paceline::bootstrap
