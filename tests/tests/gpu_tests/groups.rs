//! Products of groups that differ in tokens, rows and columns have the results of their own plans.

use half::{bf16, f16};
use microscale::gpu::cudarc::driver::CudaSlice;
use microscale::gpu::{
    DeviceEpilogue, DeviceTensor, DeviceView, Fp8Activations, GemmWorkspace, Gpu, GroupsPlan, Linear,
};
use microscale::{Activation, Error, Format};
use microscale_test_support::operands::{Scales, tensor};

use super::allocations::allocations;

/// Tokens, rows and columns of each group: the contest's tests, and a group without tokens.
const GROUPS: [[usize; 3]; 5] =
    [[96, 128, 128], [128, 256, 512], [72, 384, 256], [0, 128, 256], [1, 512, 768]];

/// The weights of each group.
fn weights(gpu: &Gpu, format: Format) -> Vec<DeviceTensor> {
    let of = |(seed, [_, rows, cols]): (u64, [usize; 3])| {
        DeviceTensor::from_host(gpu.stream(), &tensor(format, rows, cols, Scales::Common, seed)).unwrap()
    };
    (0..).zip(GROUPS).map(of).collect()
}

/// Random values, a matrix per group.
fn values<T: Activation>(gpu: &Gpu, columns: impl Fn([usize; 3]) -> usize) -> Vec<CudaSlice<T>> {
    let mut random = fastrand::Rng::with_seed(5);
    let mut of = |group: [usize; 3]| {
        let count = (group[0] * columns(group)).max(1);
        let values: Vec<_> = (0..count).map(|_| T::from_f32(random.f32() * 4.0 - 2.0)).collect();
        gpu.stream().clone_htod(&values).unwrap()
    };
    GROUPS.into_iter().map(&mut of).collect()
}

fn bits<T: Activation>(gpu: &Gpu, groups: &[CudaSlice<T>]) -> Vec<Vec<u32>> {
    let of = |group: &CudaSlice<T>| {
        gpu.stream().clone_dtoh(group).unwrap().iter().map(|y| y.to_f32().to_bits()).collect()
    };
    groups.iter().map(of).collect()
}

/// Compares all groups' results with the results of a plan for each. `each` runs a group on its
/// own, and `all` runs all of them.
fn check<'a, T: Activation, K>(
    gpu: &'a Gpu,
    linears: Vec<Linear<'a, T, T, K>>,
    each: impl Fn(usize, Linear<'a, T, T, K>, &mut CudaSlice<T>),
    all: impl Fn(&GroupsPlan<'a, T, T, K>, &mut GemmWorkspace, &mut [CudaSlice<T>]),
) where
    Linear<'a, T, T, K>: Copy,
{
    let mut expected = values::<T>(gpu, |[_, rows, _]| rows);
    for (i, (linear, out)) in linears.iter().zip(&mut expected).enumerate() {
        each(i, *linear, out);
    }
    let plan = gpu.linear_groups(linears.iter().copied().zip(GROUPS.map(|[tokens, ..]| tokens))).unwrap();
    assert_eq!(plan.plans().len(), GROUPS.len());
    let mut workspace = GemmWorkspace::new(gpu.stream(), plan.workspace_bytes()).unwrap();
    let mut found = values::<T>(gpu, |[_, rows, _]| rows);
    // Twice: the workspace must be left as it was found.
    for _ in 0..2 {
        all(&plan, &mut workspace, &mut found);
    }
    assert_eq!(bits(gpu, &found), bits(gpu, &expected));
}

pub(crate) fn of_values_have_the_results_of_their_own_plans(gpu: &Gpu) {
    let stream = gpu.stream();
    for format in Format::MULTIPLIED {
        let weights = weights(gpu, format);
        let (x, bias) = (values::<bf16>(gpu, |[.., cols]| cols), values::<bf16>(gpu, |[_, rows, _]| rows));
        let linears = weights.iter().zip(&bias).zip(GROUPS).map(|((weights, bias), [tokens, ..])| {
            // Only groups with tokens have a bias.
            let bias = (tokens > 0).then(|| DeviceView::from(bias));
            gpu.linear::<bf16, bf16>(weights).epilogue(DeviceEpilogue { bias, ..DeviceEpilogue::default() })
        });
        check(
            gpu,
            linears.collect(),
            |i, linear, out| {
                let plan = linear.plan(GROUPS[i][0]).unwrap();
                let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
                plan.run(stream, &x[i], &mut workspace, out).unwrap();
            },
            |plan, workspace, out| plan.run(stream, &x, workspace, out).unwrap(),
        );
    }
}

pub(crate) fn of_fp4_have_the_results_of_their_own_plans(gpu: &Gpu) {
    let stream = gpu.stream();
    for format in Format::MULTIPLIED {
        let weights = weights(gpu, format);
        let of = |(seed, [tokens, _, cols]): (u64, [usize; 3])| {
            DeviceTensor::from_host(stream, &tensor(format, tokens, cols, Scales::Common, seed)).unwrap()
        };
        let x: Vec<_> = (9..).zip(GROUPS).map(of).collect();
        check(
            gpu,
            weights.iter().map(|weights| gpu.linear_fp4::<f16, f16>(weights).alpha(0.5)).collect(),
            |i, linear, out| {
                let plan = linear.plan(GROUPS[i][0]).unwrap();
                let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
                plan.run(stream, &x[i], &mut workspace, out).unwrap();
            },
            |plan, workspace, out| plan.run(stream, &x, workspace, out).unwrap(),
        );
    }
}

pub(crate) fn of_fp8_have_the_results_of_their_own_plans(gpu: &Gpu) {
    if gpu.info().compute_capability != (9, 0) {
        return;
    }
    let stream = gpu.stream();
    let weights = weights(gpu, Format::Mxfp4);
    let x = values::<bf16>(gpu, |[.., cols]| cols);
    check(
        gpu,
        weights.iter().map(|weights| gpu.linear_fp8::<bf16, bf16>(weights)).collect(),
        |i, linear, out| {
            let plan = linear.plan(GROUPS[i][0]).unwrap();
            let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
            plan.run(stream, Fp8Activations::Values((&x[i]).into()), &mut workspace, out).unwrap();
        },
        |plan, workspace, out| {
            let x: Vec<_> = x.iter().map(|x| Fp8Activations::Values(x.into())).collect();
            plan.run(stream, x, workspace, out).unwrap();
        },
    );
}

/// Running allocates nothing on the host, and operands that are missing are refused.
pub(crate) fn are_enqueued_without_allocating(_: &Gpu) {
    let gpu = Gpu::new(0).unwrap();
    // SAFETY: everything below is on one stream.
    unsafe { gpu.context().disable_event_tracking() };
    let stream = gpu.stream();
    let weights = weights(&gpu, Format::Nvfp4);
    let x = values::<bf16>(&gpu, |[.., cols]| cols);
    let mut out = values::<bf16>(&gpu, |[_, rows, _]| rows);
    let groups = weights.iter().zip(GROUPS).map(|(weights, [tokens, ..])| (gpu.linear(weights), tokens));
    let plan = gpu.linear_groups::<bf16, bf16, _>(groups).unwrap();
    let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
    let mut product = || plan.run(stream, &x, &mut workspace, &mut out).unwrap();
    product();
    assert_eq!(allocations(product), 0);
    let error = plan.run(stream, &x[1..], &mut workspace, &mut out).unwrap_err();
    assert!(matches!(error, Error::Length { .. }), "{error}");
    stream.synchronize().unwrap();
    // SAFETY: nothing is in flight; later tests may use several streams again.
    unsafe { gpu.context().enable_event_tracking() };
}
