// ampkernels._plan: the host-side planner in Python, for explain() and the tests. One add_* line for each plan header.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "plan/gemm_plan.h"

namespace py = pybind11;
namespace ak = ampkernels;

namespace {

ak::DType dtype_named(const std::string& name) {
  for (const ak::DType d : {ak::DType::kFloat16, ak::DType::kBFloat16, ak::DType::kFloat32, ak::DType::kFloat64})
    if (name == ak::dtype_name(d)) return d;
  throw std::invalid_argument("plan: unknown dtype '" + name + "'");
}

ak::EpilogueKind epilogue_named(const std::string& name) {
  if (name == "linear") return ak::EpilogueKind::kLinear;
  if (name == "gated") return ak::EpilogueKind::kGated;
  if (name == "act_grad") return ak::EpilogueKind::kActGrad;
  throw std::invalid_argument("plan: epilogue must be 'linear', 'gated' or 'act_grad', got '" + name + "'");
}

ak::GemmPlan make_gemm_plan(int64_t m, int64_t n, int64_t k, const std::string& dtype, const std::string& acc,
                            int64_t chunk, bool a_kmajor, bool b_kmajor, bool aligned, const std::string& epilogue,
                            int arch, int sms) {
  ak::GemmProblem p;
  p.m = m, p.n = n, p.k = k;
  p.dtype = dtype_named(dtype);
  p.accumulate = {dtype_named(acc), chunk};
  p.a_kmajor = a_kmajor, p.b_kmajor = b_kmajor, p.aligned = aligned;
  p.epilogue = epilogue_named(epilogue);
  p.arch = arch, p.sms = sms;
  return ak::gemm_plan(p);
}

py::dict as_dict(const ak::GemmPlan& plan) {
  py::dict d;
  d["kernel"] = plan.kernel;
  d["tile"] = py::make_tuple(plan.tile_m, plan.tile_n, plan.tile_k);
  d["stages"] = plan.stages;
  d["warps"] = plan.warps;
  d["cluster"] = plan.cluster;
  d["group_m"] = plan.group_m;
  d["split"] = plan.split;
  d["split_len"] = plan.split_len;
  d["aligned"] = plan.aligned;
  d["reason"] = plan.reason;
  return d;
}

void add_gemm_plan(py::module_& m) {
  const auto define = [&](const char* name, auto convert, const char* doc) {
    m.def(
        name,
        [convert](int64_t m, int64_t n, int64_t k, const std::string& dtype, const std::string& acc, int64_t chunk,
                  bool a_kmajor, bool b_kmajor, bool aligned, const std::string& epilogue, int arch, int sms) {
          return convert(make_gemm_plan(m, n, k, dtype, acc, chunk, a_kmajor, b_kmajor, aligned, epilogue, arch, sms));
        },
        py::arg("m"), py::arg("n"), py::arg("k"), py::arg("dtype") = "bfloat16", py::arg("acc") = "float32",
        py::arg("chunk") = 0, py::arg("a_kmajor") = true, py::arg("b_kmajor") = true, py::arg("aligned") = true,
        py::arg("epilogue") = "linear", py::arg("arch") = 90, py::arg("sms") = 132, doc);
  };
  define(
      "gemm_plan", [](const ak::GemmPlan& plan) { return ak::to_string(plan); },
      "The mma.sync GEMM's plan for a problem, as one line of text.");
  define("gemm_plan_dict", [](const ak::GemmPlan& plan) { return as_dict(plan); }, "The same as a dict.");
}

}  // namespace

PYBIND11_MODULE(_plan, m) {
  m.doc() = "Which kernel runs, with what tile and split: pure functions of the problem.";
  add_gemm_plan(m);
}
