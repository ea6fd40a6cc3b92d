// ampkernels._plan: the host-side planners in Python, for explain() and the tests. One add_* line for each planner.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "plan/divisor.h"
#include "plan/gemm_plan.h"
#include "plan/gemm_sm90_plan.h"
#include "plan/gemm_small_plan.h"
#include "plan/rows_plan.h"

namespace py = pybind11;
namespace ak = ampkernels;

namespace {

ak::DType dtype_named(const std::string& name) {
  if (name == "fp16") return ak::DType::kFloat16;
  if (name == "bf16") return ak::DType::kBFloat16;
  if (name == "fp32") return ak::DType::kFloat32;
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

ak::RowsOp rows_op_named(const std::string& name) {
  if (name == "softmax" || name == "log_softmax") return ak::RowsOp::kSoftmaxFwd;
  if (name == "softmax_bwd" || name == "log_softmax_bwd") return ak::RowsOp::kSoftmaxBwd;
  if (name == "layer_norm" || name == "rms_norm") return ak::RowsOp::kNormFwd;
  if (name == "layer_norm_bwd" || name == "rms_norm_bwd") return ak::RowsOp::kNormBwd;
  throw std::invalid_argument("plan: unknown row op '" + name + "'");
}

ak::GemmParams params_of(const ak::GemmProblem& p) {
  ak::GemmParams params;
  params.m = p.m, params.n = p.n, params.k = p.k;
  params.dtype = p.dtype, params.accumulate = p.accumulate, params.kind = p.epilogue;
  params.activation = p.activation;
  return params;
}

// Of the kernel for few rows.
ak::GemmPlan small_plan_of(const ak::GemmProblem& p) {
  const ak::GemmSmallPlan small = ak::plan_gemm_small(params_of(p), p.sms);
  ak::GemmPlan plan;
  plan.kernel = "small";
  plan.tile_m = small.x_rows, plan.tile_n = small.rows, plan.tile_k = 64 * small.boxes;
  plan.stages = small.teams * small.stages;
  plan.warps = 5 * small.teams + (small.ranks * small.teams > 1 ? 4 : 0);
  plan.cluster = small.ranks;
  plan.split_len = 64 * small.chunk_blocks;
  plan.reason = small.ranks > 1 ? "m <= 64: bound by reading B; the cluster splits K" : "m <= 64: bound by reading B";
  return plan;
}

// The plan of the kernel that launch_gemm takes, as csrc/cuda/gemm.cu decides it.
ak::GemmPlan plan_of(const ak::GemmProblem& p) {
  ak::GemmPlan plan = ak::gemm_plan(p);
  const bool supported = plan.aligned && (p.accumulate.chunk % 64 == 0 || p.accumulate.chunk >= p.k) && p.k > 0;
  if (ak::gemm_prefers_small(p) && supported && p.m > 0 && p.a_kmajor && p.b_kmajor &&
      p.accumulate.dtype == ak::DType::kFloat32 && p.epilogue != ak::EpilogueKind::kActGrad) {
    return small_plan_of(p);
  }
  if (!ak::gemm_prefers_sm90(p) || !supported) return plan;
  const ak::GemmSm90Plan sm90 = ak::plan_gemm_sm90(params_of(p), p.sms);
  const ak::TileShape tile = ak::tile_shape(sm90.tile);
  const bool pingpong = tile.schedule == ak::Schedule::kPingpong;
  plan.kernel = "sm90";
  plan.tile_m = tile.m, plan.tile_n = tile.n, plan.tile_k = 64;
  plan.stages = 0;  // what shared memory holds
  plan.warps = 12;
  plan.cluster = sm90.share == ak::Share::kNone ? 1 : 2;
  plan.split = sm90.splits;
  plan.split_len = sm90.splits == 1         ? p.k
                   : p.accumulate.chunk > 0 ? p.accumulate.chunk
                                            : ((p.k + 63) / 64 + sm90.splits - 1) / sm90.splits * 64;
  plan.reason = sm90.splits > 1 ? "TMA and WGMMA, too few tiles: K split"
                : pingpong      ? "TMA and WGMMA, two tiles in turns"
                                : "TMA and WGMMA, one tile by two warpgroups";
  return plan;
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
  d["pack_a"] = plan.pack_a;
  d["pack_b"] = plan.pack_b;
  d["reason"] = plan.reason;
  return d;
}

template <typename Convert>
void define_gemm_plan(py::module_& m, const char* name, Convert convert, const char* doc) {
  m.def(
      name,
      [convert](int64_t m, int64_t n, int64_t k, const std::string& dtype, const std::string& acc, int64_t chunk,
                bool a_kmajor, bool b_kmajor, const std::string& epilogue, int arch, bool aligned, int sms,
                bool activated) {
        ak::GemmProblem p;
        p.m = m, p.n = n, p.k = k;
        p.dtype = dtype_named(dtype);
        p.accumulate = {dtype_named(acc), chunk};
        p.a_kmajor = a_kmajor, p.b_kmajor = b_kmajor;
        p.a_aligned = p.b_aligned = aligned;
        p.epilogue = epilogue_named(epilogue);
        p.activation = activated ? ak::Activation::kGelu : ak::Activation::kNone;  // all that a plan asks of it
        p.arch = arch, p.sms = sms;
        return convert(p);
      },
      py::arg("m"), py::arg("n"), py::arg("k"), py::arg("dtype") = "bfloat16", py::arg("acc") = "float32",
      py::arg("chunk") = 0, py::arg("a_kmajor") = true, py::arg("b_kmajor") = true, py::arg("epilogue") = "linear",
      py::arg("arch") = 90, py::arg("aligned") = true, py::arg("sms") = 132, py::arg("activated") = false, doc);
}

void add_gemm_plan(py::module_& m) {
  define_gemm_plan(
      m, "gemm_plan", [](const ak::GemmProblem& p) { return ak::to_string(plan_of(p)); },
      "The plan of a GEMM D (m, n) = A (m, k) B (n, k)^T as one line of text; n = 2F for a gated one.");
  define_gemm_plan(
      m, "gemm_plan_dict", [](const ak::GemmProblem& p) { return as_dict(plan_of(p)); }, "The same as a dict.");
  define_gemm_plan(
      m, "gemm_small_plan_dict", [](const ak::GemmProblem& p) { return as_dict(small_plan_of(p)); },
      "Of the Hopper kernel for 1 to 64 rows, whether or not it is taken.");
}

void add_divisor(py::module_& m) {
  m.def(
      "quotients",
      [](const std::vector<int32_t>& numerators, uint32_t divisor) {
        const ak::Divisor by(divisor);
        std::vector<int32_t> found;
        found.reserve(numerators.size());
        for (const int32_t n : numerators) found.push_back(by.quotient(n));
        return found;
      },
      py::arg("numerators"), py::arg("divisor"),
      "numerators // divisor, 0 <= numerator < 2^31, as the kernels divide.");
}

void add_rows_plan(py::module_& m) {
  m.def(
      "rows_plan",
      [](const std::string& op, int64_t cols, const std::string& dtype, int arch) {
        const ak::DType d = dtype_named(dtype);
        return ak::to_string(ak::plan_rows(rows_op_named(op), cols, d, d, ak::RowsLayout::kUnit, arch));
      },
      py::arg("op"), py::arg("cols"), py::arg("dtype") = "bfloat16", py::arg("arch") = 90,
      "The plan of a row kernel over contiguous rows of `cols` elements, as one line of text.");
}

}  // namespace

PYBIND11_MODULE(_plan, m) {
  m.doc() = "Which kernel runs, with what tile and split: pure functions of the problem.";
  add_gemm_plan(m);
  add_rows_plan(m);
  add_divisor(m);
}
