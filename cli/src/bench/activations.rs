//! Measurements of quantizing activations: every row operation with every format, and KV caches.

use half::bf16;
use microscale::formats::ScaleRule;
use microscale::formats::activations::RmsNorm;
use microscale::formats::nvfp4::Direction;
use microscale::{
    ActivationFormat, ActivationInput, ActivationScale, Device, Fp8Scale, Glu, GluOrder, KvCacheMut,
    KvFormat, Result, RowOperation, Shape, append_kv, quantize_activations,
};

use super::activation_workload::{ActivationWorkload, KV_SCALES, KvWorkload};
#[cfg(feature = "cuda")]
use super::activations_gpu;
use super::cpu;
use super::measurement::Times;
use super::workload::random;

/// A measurement.
pub(crate) struct Row {
    /// The operation and the format.
    pub what: String,
    /// Rows and columns of the output.
    pub shape: Shape,
    /// Bytes that the operation must move.
    pub bytes: u64,
    /// The median time in seconds.
    pub seconds: f64,
    /// The median time of a copy that moves the same bytes.
    pub copy_seconds: Option<f64>,
}

impl Row {
    const fn new(what: String, shape: Shape, bytes: u64, times: &Times) -> Self {
        Self { what, shape, bytes, seconds: times.operation, copy_seconds: times.copy }
    }
}

/// The sizes to measure by default: a few tokens, and matrices larger than a cache.
const SHAPES: [(usize, usize); 8] =
    [(1, 4096), (16, 4096), (64, 4096), (1, 14336), (64, 14336), (1024, 14336), (8192, 8192), (8192, 14336)];

/// A row operation, its name, and whether it adds a residual.
const OPERATIONS: [(&str, RowOperation, bool); 4] = [
    ("plain", RowOperation::None, false),
    ("silu", RowOperation::Glu(Glu::SILU, GluOrder::Halves), false),
    ("rmsnorm", RowOperation::RmsNorm(RmsNorm::llama(1e-6)), false),
    ("add-rmsnorm", RowOperation::RmsNorm(RmsNorm::llama(1e-6)), true),
];

const FORMATS: [(&str, ActivationFormat); 8] = [
    ("fp8", ActivationFormat::Fp8(Fp8Scale::Given)),
    ("fp8-tensor", ActivationFormat::Fp8(Fp8Scale::PerTensor)),
    ("fp8-token", ActivationFormat::Fp8(Fp8Scale::PerToken)),
    ("fp8-group", ActivationFormat::Fp8(Fp8Scale::PerGroup { power_of_two: false })),
    ("mxfp8", ActivationFormat::Mxfp8(ScaleRule::Rceil)),
    ("mxfp4", ActivationFormat::Mxfp4(ScaleRule::Floor)),
    ("nvfp4", ActivationFormat::Nvfp4(ActivationScale::Given(Direction::Divisor))),
    ("nvfp4-token", ActivationFormat::Nvfp4(ActivationScale::PerToken)),
];

/// Measures every operation with every format in bf16, on the given shapes or on [`SHAPES`].
pub(crate) fn measure_activations(device: &Device, given: &[(usize, usize)]) -> Result<Vec<Row>> {
    let shapes = if given.is_empty() { &SHAPES } else { given };
    let mut rows = Vec::new();
    for &size in shapes {
        for (operation_name, operation, adds) in OPERATIONS {
            for (format_name, format) in FORMATS {
                let workload = ActivationWorkload::new(operation, format, adds, size);
                let times = match device {
                    Device::Cpu => on_cpu(&workload)?,
                    #[cfg(feature = "cuda")]
                    Device::Gpus(gpus) => activations_gpu::measure_activations(&workload, gpus.first())?,
                };
                let (what, shape) = (format!("{operation_name} {format_name}"), Shape::new(size.0, size.1));
                rows.push(Row::new(what, shape, workload.bytes, &times));
            }
        }
    }
    for (name, format) in [("nvfp4", KvFormat::Nvfp4), ("fp8", KvFormat::Fp8)] {
        for tokens in [256, 32768].into_iter().filter(|_| given.is_empty()) {
            let workload = KvWorkload::new(format, tokens);
            let times = match device {
                Device::Cpu => kv_on_cpu(&workload)?,
                #[cfg(feature = "cuda")]
                Device::Gpus(gpus) => activations_gpu::measure_kv(&workload, gpus.first())?,
            };
            rows.push(Row::new(format!("append-kv {name}"), workload.rows, workload.bytes, &times));
        }
    }
    Ok(rows)
}

fn on_cpu(workload: &ActivationWorkload) -> Result<Times> {
    let values = random::<bf16>(workload.shape.elements(), 1);
    let columns = workload.columns();
    let mut residual = workload.adds.then(|| random::<bf16>(workload.shape.rows * columns, 2));
    let weights = workload.weighs().then(|| random::<bf16>(columns, 3));
    cpu::measure_against_copy(workload.bytes, || {
        let input = ActivationInput {
            residual: residual.as_deref_mut(),
            weights: weights.as_deref(),
            scales: workload.scales,
            ..ActivationInput::new(&values, workload.shape)
        };
        quantize_activations(input, &workload.recipe).map(|_| ())
    })
}

fn kv_on_cpu(workload: &KvWorkload) -> Result<Times> {
    let KvWorkload { shape, format, rows, ref slots, bytes } = *workload;
    let (keys, values) = (random::<bf16>(rows.elements(), 1), random::<bf16>(rows.elements(), 2));
    let [codes, scales] = workload.lengths();
    let mut parts = [vec![0; codes], vec![0; codes], vec![0; scales], vec![0; scales]];
    cpu::measure_against_copy(bytes, || {
        let [key_codes, value_codes, key_scales, value_scales] = &mut parts;
        let cache = KvCacheMut { key_codes, value_codes, key_scales, value_scales };
        append_kv(&shape, format, &keys, &values, rows, slots, KV_SCALES, cache)
    })
}
