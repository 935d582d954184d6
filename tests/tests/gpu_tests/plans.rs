//! Plans of products: made once, run many times, for any alignment, with exactly the workspace that they ask for.

use half::bf16;
use microscale::gpu::{
    DeviceExperts, DeviceRouting, DeviceTensor, ExpertRows, GemmWorkspace, GemmWorkspaceMut, Gpu,
};
use microscale::{Dtype, Error, Format, OperandFault, QuantizedTensor};
use microscale_kernels_abi::GemmConfig;
use microscale_test_support::operands::{Scales, tensor};
use microscale_test_support::weights::{Activations, Bound, ExactProducts, is_unusual};

use super::allocations::allocations;
use super::gemv_weights::{Product, assert_same};
use super::raw::Raw;

/// The largest product that tensor cores may lose: they may drop subnormal numbers.
const LEAST: f64 = f64::from_bits((1023 - 126) << 52);

/// Weights that every mainloop takes, and weights that only the reference takes.
fn some_weights() -> [QuantizedTensor; 3] {
    [(Format::Nvfp4, 600, 2048), (Format::Mxfp4, 70, 2880), (Format::Mxfp4, 33, 1000)]
        .map(|(format, rows, cols)| tensor(format, rows, cols, Scales::Common, 3))
}

/// Planning a product again gives the plan that was made before.
pub(crate) fn made_twice_are_the_same(gpu: &Gpu) {
    for weights in some_weights() {
        let there = DeviceTensor::from_host(gpu.stream(), &weights).unwrap();
        let experts = DeviceExperts::from_host(gpu.stream(), [&weights, &weights]).unwrap();
        for tokens in [0, 1, 7, 16, 33, 200] {
            let facts = || {
                let plan = gpu.linear::<bf16, f32>(&there).plan(tokens).unwrap();
                let kernels: Vec<_> = plan.kernels().collect();
                let experts = gpu.linear_experts::<bf16, bf16>(&experts).plan(tokens).unwrap();
                let configs = [plan.config(), experts.config()];
                (configs, kernels, [plan.workspace_bytes(), experts.workspace_bytes()])
            };
            let first = facts();
            assert_eq!(facts(), first, "{:?}, {tokens} tokens", weights.shape());
            assert_eq!(first.0[0].is_none(), tokens == 0);
            // Other GPUs' handles choose the same.
            let other = Gpu::new(gpu.info().ordinal).unwrap();
            let plan = other.linear::<bf16, f32>(&there).plan(tokens).unwrap();
            assert_eq!(plan.config(), first.0[0], "{:?}, {tokens} tokens", weights.shape());
        }
    }
}

/// A product that was planned before is planned and launched without a heap allocation.
pub(crate) fn run_without_allocating(_: &Gpu) {
    // Its own context state, without cudarc's events.
    let gpu = Gpu::new(0).unwrap();
    // SAFETY: everything below is on one stream.
    unsafe { gpu.context().disable_event_tracking() };
    let stream = gpu.stream();
    for weights in some_weights() {
        let there = DeviceTensor::from_host(stream, &weights).unwrap();
        let experts = DeviceExperts::from_host(stream, [&weights, &weights]).unwrap();
        for tokens in [1, 8, 40, 200] {
            let x = stream.alloc_zeros::<bf16>(tokens * weights.cols() + 1).unwrap();
            let mut out = stream.alloc_zeros::<bf16>(tokens * weights.rows()).unwrap();
            let bytes = gpu.linear::<bf16, bf16>(&there).plan(tokens).unwrap().workspace_bytes();
            let mut workspace = GemmWorkspace::new(stream, bytes).unwrap();
            // Activations that start on 16 bytes, and others, which may get another plan.
            for skipped in [0, 1] {
                let x = x.slice(skipped..);
                let mut product = || {
                    let plan = gpu.linear::<bf16, bf16>(&there).plan(tokens).unwrap();
                    plan.run(stream, &x, &mut workspace, &mut out).unwrap();
                };
                product();
                let count = allocations(product);
                assert_eq!(count, 0, "{:?}, {tokens} tokens, {skipped} skipped", weights.shape());
            }

            let chosen = stream.clone_htod(&vec![1u32; tokens]).unwrap();
            let mut routing = DeviceRouting::zeros(stream, 2, tokens).unwrap();
            gpu.route_on(stream, &chosen, 1, &mut routing).unwrap();
            let mut workspace = gpu.experts_workspace(stream, &experts, tokens, Dtype::Bf16).unwrap();
            let mut product = || {
                let plan = gpu.linear_experts::<bf16, bf16>(&experts).plan(tokens).unwrap();
                plan.run(stream, &x, &routing, ExpertRows::Gathered, &mut workspace, &mut out).unwrap();
            };
            product();
            assert_eq!(allocations(product), 0, "experts of {:?}, {tokens} tokens", weights.shape());
        }
    }
    stream.synchronize().unwrap();
    // SAFETY: nothing is in flight; later tests may use several streams again.
    unsafe { gpu.context().enable_event_tracking() };
}

/// A workspace of exactly the bytes of a plan is enough, one that is a byte short is refused, and a workspace for
/// any number of tokens is at least as large.
pub(crate) fn ask_for_their_workspace(gpu: &Gpu) {
    let stream = gpu.stream();
    for weights in some_weights() {
        let shape = weights.shape();
        let there = DeviceTensor::from_host(stream, &weights).unwrap();
        for tokens in [1, 9, 40, 200, 513] {
            let x = stream.alloc_zeros::<bf16>(tokens * weights.cols()).unwrap();
            let mut out = stream.alloc_zeros::<bf16>(tokens * weights.rows()).unwrap();
            let plan = gpu.linear::<bf16, bf16>(&there).plan(tokens).unwrap();
            let bytes = plan.workspace_bytes();
            let most = gpu.gemm_workspace_bytes(shape, tokens, Dtype::Bf16).unwrap();
            assert!(bytes <= most, "{plan:?}: {bytes} bytes, and at most {most}");
            if bytes == 0 {
                plan.run(stream, &x, GemmWorkspaceMut::none(), &mut out).unwrap();
                continue;
            }
            let memory = Raw::zeros(stream, bytes);
            // SAFETY: the memory has `bytes` bytes, zeros at first, and only products write there.
            let of = |bytes| unsafe { GemmWorkspaceMut::from_raw_parts(memory.address(), bytes) }.unwrap();
            let refused = plan.run(stream, &x, of(bytes - 1), &mut out).unwrap_err();
            match refused {
                Error::Operands(OperandFault::Workspace { needed, found }) => assert_eq!(needed, found + 1),
                other => panic!("{plan:?}: {other:?}"),
            }
            plan.run(stream, &x, of(bytes), &mut out).unwrap();
            // Nothing was written past its end.
            memory.read();
            for config in gpu.gemm_configs(shape).into_iter().filter(|config| !config.mainloop.is_gemv()) {
                let Ok(plan) = gpu.linear::<bf16, bf16>(&there).by(config).plan(tokens) else { continue };
                assert!(tokens <= 8 || plan.workspace_bytes() <= most, "{plan:?}, at most {most} bytes");
            }
        }
    }
}

/// The bound of whichever configuration multiplies.
fn bound(weights: &QuantizedTensor) -> Bound {
    let cols = weights.cols();
    let few = Bound::of_tensor_cores::<bf16>(cols, [8, 16], LEAST);
    Bound::of_gemm::<bf16>(cols, LEAST).or(few).or(Bound::of_one_token::<bf16>(weights, 1, LEAST))
}

/// A plan serves activations that start anywhere, with its workspace.
pub(crate) fn serve_unaligned_activations(gpu: &Gpu) {
    let stream = gpu.stream();
    for weights in some_weights() {
        for tokens in [1, 8, 20, 40, 200] {
            let product = Product::<bf16>::new(weights.clone(), tokens, Activations::Common);
            let exact = ExactProducts::of(&product.weights, &product.x, tokens);
            let there = DeviceTensor::from_host(stream, &product.weights).unwrap();
            let linear = gpu.linear::<bf16, bf16>(&there);
            for plan in [linear.plan(tokens).unwrap(), linear.without_workspace().plan(tokens).unwrap()] {
                let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
                for skipped in [0, 1, 3, 8] {
                    let x = [vec![bf16::NAN; skipped], product.x.clone()].concat();
                    let x = stream.clone_htod(&x).unwrap();
                    let mut out = stream.alloc_zeros::<bf16>(product.results.len()).unwrap();
                    plan.run(stream, &x.slice(skipped..), &mut workspace, &mut out).unwrap();
                    let found = stream.clone_dtoh(&out).unwrap();
                    let usual = |row: usize| !is_unusual::<bf16>(&product.weights, row);
                    let near = exact.check_some(&found, &bound(&product.weights), usual);
                    near.unwrap_or_else(|wrong| panic!("{wrong}, {plan:?}, {skipped} skipped"));
                }
            }
        }
    }
}

/// A configuration of another target, and one that does not take the weights, are refused.
pub(crate) fn of_configurations_that_do_not_fit_are_refused(gpu: &Gpu) {
    let stream = gpu.stream();
    let ragged = tensor(Format::Mxfp4, 33, 1000, Scales::Common, 3);
    let there = DeviceTensor::from_host(stream, &ragged).unwrap();
    let usable = gpu.gemm_configs(ragged.shape());
    for config in GemmConfig::for_operands(Format::Mxfp4, Dtype::Bf16).filter(|it| !usable.contains(it)) {
        let refused = gpu.linear::<bf16, bf16>(&there).by(config).plan(2).map(drop);
        assert!(matches!(refused, Err(Error::NoKernel { format: Format::Mxfp4 })), "{config}: {refused:?}");
    }
    // A plan runs as often as it is wanted.
    let product = Product::<bf16>::new(ragged, 2, Activations::Common);
    let x = stream.clone_htod(&product.x).unwrap();
    let mut out = stream.alloc_zeros::<bf16>(product.results.len()).unwrap();
    let plan = gpu.linear::<bf16, bf16>(&there).plan(2).unwrap();
    for _ in 0..3 {
        plan.run(stream, &x, GemmWorkspaceMut::none(), &mut out).unwrap();
        assert_same(&stream.clone_dtoh(&out).unwrap(), &product.results, "a plan's next run");
        stream.memset_zeros(&mut out).unwrap();
    }
}
