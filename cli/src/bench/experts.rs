//! Measurements of products of experts' quantized weights and activations in 16 bits or FP8, on a
//! GPU.

use microscale::formats::weights::{gemm_gamma, tensor_core_gamma};
use microscale::gpu::cudarc::driver::CudaSlice;
use microscale::gpu::{
    DeviceExperts, DeviceRouting, ExpertRows, Fp8, Fp8Activations, GemmConfig, GemmWorkspace, Gpu,
    LinearExperts, doing as failed,
};
use microscale::{
    Activation, Device, Error, Fp8Options, QuantizedShape, QuantizedTensor, QuantizedView, Result, Shape,
};

use super::case::Case;
use super::gpu::{Effort, Turns, copy_time, each_in_rotation, tensor_cores_per_second};
use super::measurement::Times;
use super::op::Op;
use super::product::{chosen, experts_bytes, matrix, matrix_of};
use super::weights::{Nearly, WeightsProduct};
use super::workload::random;

/// Maximum number of rows whose results are compared.
const COMPARED: usize = 16;

/// Weights of experts, the experts of each token in token order, and activations.
struct Mixture<T> {
    weights: QuantizedTensor,
    shape: QuantizedShape,
    experts: usize,
    top_k: usize,
    chosen: Vec<u32>,
    activations: Vec<T>,
    /// Activations are multiplied in FP8.
    fp8: bool,
}

impl<T: Activation> Mixture<T> {
    fn new(case: &Case) -> Result<Self> {
        let size = case.size;
        let (tokens, experts) = (size.tokens.map_or(1, usize::from), size.batches);
        let top_k = size.top_k.min(experts);
        Shape::new(tokens * top_k, size.cols).span()?;
        Shape::new(tokens * top_k, size.rows).span()?;
        let weights = matrix(&case.recipe, size)?;
        let shape = QuantizedShape { rows: size.rows, ..weights.shape() };
        let (chosen, activations) = (chosen(size), random(tokens * size.cols, 2));
        Ok(Self { weights, shape, experts, top_k, chosen, activations, fp8: case.op == Op::GemmExpertsFp8 })
    }

    /// Returns the weights of an expert.
    fn expert(&self, expert: usize) -> Result<QuantizedView<'_>> {
        matrix_of(self.weights.view(), self.experts, expert)
    }

    /// Returns the bytes of the chosen experts' codes and scales.
    fn bytes(&self) -> u64 {
        experts_bytes(&self.weights, self.experts, &self.chosen)
    }

    /// Returns the results of one token, and their error bound.
    fn nearly(&self, product: WeightsProduct<T>) -> Result<Nearly<T>> {
        let cols = self.shape.cols;
        if self.fp8 {
            return product.nearly_in_fp8();
        }
        product.nearly(tensor_core_gamma(cols).max(gemm_gamma(cols)))
    }

    /// Compares some rows of results, sorted by expert, with the CPU's results.
    fn check(&self, found: &[T]) -> Result<()> {
        let (rows, cols) = (self.shape.rows, self.shape.cols);
        let mut sorted: Vec<_> = (0..self.chosen.len()).collect();
        sorted.sort_by_key(|pair| self.chosen[*pair]);
        for place in (0..sorted.len()).step_by(sorted.len().div_ceil(COMPARED)) {
            let pair = sorted[place];
            let weights = self.expert(self.chosen[pair] as usize)?.to_tensor();
            let activations = self.activations[pair / self.top_k * cols..][..cols].to_vec();
            let nearly = self.nearly(WeightsProduct { weights, activations, tokens: 1 })?;
            nearly.check("experts' weights times activations on the GPU", &found[place * rows..][..rows])?;
        }
        Ok(())
    }
}

/// Returns the bytes of the chosen experts' codes and scales, and times, without sorting the pairs.
pub(super) fn measure<T: Activation>(case: &Case, device: &Device) -> Result<(u64, Times)> {
    let Device::Gpus(gpus) = device else {
        return Err(Error::NoGpu("gemm-experts is measured on GPUs only".into()));
    };
    let (mixture, gpu) = (Mixture::<T>::new(case)?, gpus.first());
    // SAFETY: all work of this function is on one stream, which orders it without events. A capture
    // does not allow events.
    unsafe { gpu.context().disable_event_tracking() };
    let times = on_gpu(&mixture, case, gpu)?;
    Ok((mixture.bytes(), times))
}

/// A product of experts' weights on a GPU.
struct Product<'a, T> {
    gpu: &'a Gpu,
    activations: &'a CudaSlice<T>,
    routing: &'a DeviceRouting,
    pairs: usize,
    fp8: bool,
    /// The requested configuration; `None` is the plan's choice.
    config: Option<GemmConfig>,
}

impl<T: Activation> Product<'_, T> {
    /// Returns the bytes of the workspace, and the configuration.
    fn plan(&self, experts: &DeviceExperts) -> Result<(usize, Option<GemmConfig>)> {
        if self.fp8 {
            let plan = self.linear_fp8(experts).plan(self.pairs)?;
            return Ok((plan.workspace_bytes(), plan.config()));
        }
        let plan = self.linear(experts).plan(self.pairs)?;
        Ok((plan.workspace_bytes(), plan.config()))
    }

    fn run(
        &self,
        experts: &DeviceExperts,
        workspace: &mut GemmWorkspace,
        out: &mut CudaSlice<T>,
    ) -> Result<()> {
        let Self { gpu, activations, routing, pairs, .. } = *self;
        let (stream, rows) = (gpu.stream(), ExpertRows::Gathered);
        if self.fp8 {
            let activations = Fp8Activations::Values(activations.into());
            let plan = self.linear_fp8(experts).plan(pairs)?;
            return plan.run(stream, activations, routing, rows, workspace, out);
        }
        self.linear(experts).plan(pairs)?.run(stream, activations, routing, rows, workspace, out)
    }

    fn linear<'e>(&'e self, experts: &'e DeviceExperts) -> LinearExperts<'e, T, T> {
        self.by_config(self.gpu.linear_experts(experts))
    }

    fn linear_fp8<'e>(&'e self, experts: &'e DeviceExperts) -> LinearExperts<'e, T, T, Fp8> {
        let options = Fp8Options { round_weights: true, ..Fp8Options::default() };
        self.by_config(self.gpu.linear_experts_fp8(experts).options(options))
    }

    fn by_config<'e, K>(&self, linear: LinearExperts<'e, T, T, K>) -> LinearExperts<'e, T, T, K> {
        match self.config {
            #[cfg(feature = "internals")]
            Some(config) => linear.by(config),
            _ => linear,
        }
    }
}

fn on_gpu<T: Activation>(mixture: &Mixture<T>, case: &Case, gpu: &Gpu) -> Result<Times> {
    let (stream, bytes) = (gpu.stream(), mixture.bytes());
    let copying = failed("copying the activations");
    let activations = stream.clone_htod(&mixture.activations).map_err(&copying)?;
    let chosen = stream.clone_htod(&mixture.chosen).map_err(&copying)?;
    let pairs = mixture.chosen.len();
    let mut routing = DeviceRouting::zeros(stream, mixture.experts, pairs)?;
    gpu.route_on(stream, &chosen, mixture.top_k, &mut routing)?;
    let of_all = || {
        let views = (0..mixture.experts).map(|expert| mixture.expert(expert));
        DeviceExperts::from_host(stream, views.collect::<Result<Vec<_>>>()?)
    };
    let product = Product {
        gpu,
        activations: &activations,
        routing: &routing,
        pairs,
        fp8: mixture.fp8,
        config: case.kernel(),
    };
    let (workspace_bytes, config) = product.plan(&of_all()?)?;
    let mut workspace = GemmWorkspace::new(stream, workspace_bytes)?;
    let turns = Turns::of(bytes, bytes, Effort::FULL);
    let operation = each_in_rotation(
        stream,
        || {
            let results = pairs * mixture.shape.rows;
            let out = stream.alloc_zeros::<T>(results).map_err(failed("allocating the output"))?;
            Ok((of_all()?, out))
        },
        (&[()], turns, Effort::FULL),
        |(), (experts, out)| product.run(experts, &mut workspace, out),
        |(), (_, out)| mixture.check(&stream.clone_dtoh(out).map_err(failed("copying the output back"))?),
    )?[0];
    Ok(Times {
        operation,
        read: None,
        copy: Some(copy_time(stream, bytes)?),
        kernel: config.map(|config| config.to_string()),
        tensor_cores_per_second: tensor_cores_per_second(gpu)?
            .map(|rate| if mixture.fp8 { 2.0 * rate } else { rate }),
    })
}
