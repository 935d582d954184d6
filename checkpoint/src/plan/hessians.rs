//! Hessians of layers' inputs, for GPTQ. Layers with one input share a factor.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use microscale::{Format, GptqFactor, GptqOptions, GptqOrder, GptqScales, HadamardWidth, hadamard_hessian};

use crate::calibration::{self, INPUTS, hessian, layer_file};
use crate::dtype::FileDtype;
use crate::error::given::GivenError;
use crate::error::{Error, Result};
use crate::pipeline::lock;
use crate::plan::tensor_recipe::TensorRecipe;
use crate::read::checkpoint::Checkpoint;
use crate::read::tensor::Tensor;
use crate::read::values::typed;

/// How GPTQ quantizes the layers of a checkpoint.
#[derive(Clone, Debug)]
pub struct Gptq {
    /// Directory of `microscale calibrate`, with Hessians.
    pub statistics: PathBuf,
    /// Damping and order of columns.
    pub options: GptqOptions,
    /// Whether block scales are chosen in the loop or before it.
    pub scales: GptqScales,
}

impl Gptq {
    /// The words of the orders of columns.
    pub const ORDERS: [(&'static str, GptqOrder); 3] = [
        ("blocks", GptqOrder::Activation),
        ("columns", GptqOrder::ActivationColumns),
        ("natural", GptqOrder::Natural),
    ];

    /// The defaults with the statistics of a directory.
    pub fn new(statistics: impl Into<PathBuf>) -> Self {
        Self { statistics: statistics.into(), options: GptqOptions::new(), scales: GptqScales::InLoop }
    }

    /// Takes options; `None` for their defaults. An order of columns without regard to blocks needs
    /// static scales, and gets them.
    pub fn with(self, order: Option<GptqOrder>, static_scales: bool, damping: Option<f64>) -> Self {
        let mut gptq = self;
        gptq.options.order = order.unwrap_or(gptq.options.order);
        gptq.options.damping = damping.unwrap_or(gptq.options.damping);
        if static_scales || gptq.options.order == GptqOrder::ActivationColumns {
            gptq.scales = GptqScales::Static;
        }
        gptq
    }

    /// Returns the options in words.
    pub(crate) fn in_words(&self) -> String {
        let order = match self.options.order {
            GptqOrder::Natural => "natural order",
            GptqOrder::ActivationColumns => "activation order of columns",
            _ => "activation order of blocks",
        };
        let scales = match self.scales {
            GptqScales::Static => "static scales",
            _ => "scales in the loop",
        };
        format!("{scales}, {order}, damping {}", self.options.damping)
    }
}

/// The Hessians of a tensor's inputs.
#[derive(Clone, Debug)]
pub(crate) struct TensorHessians {
    /// Names of the Hessians, one, or one per expert; `None` for an expert without tokens.
    names: Vec<Option<String>>,
    /// Rows per name.
    rows_each: usize,
    format: Format,
    /// The transform of the inputs.
    hadamard: Option<HadamardWidth>,
}

impl TensorHessians {
    /// Returns the rows per Hessian, if there are several.
    pub(crate) fn rows_each(&self) -> Option<usize> {
        (self.names.len() > 1).then_some(self.rows_each)
    }

    /// Returns the name for rows from `row` on, which must belong to one expert.
    fn name(&self, row: usize) -> Option<&str> {
        self.names.get(row / self.rows_each.max(1))?.as_deref()
    }
}

/// The Hessians of a plan, and their factors while tensors need them.
pub(crate) struct Hessians {
    pub(crate) gptq: Gptq,
    files: Vec<Checkpoint>,
    /// The file of each Hessian.
    file_of: HashMap<String, usize>,
    inputs: HashMap<String, String>,
    factors: Mutex<HashMap<FactorKey, Factor>>,
}

/// The name of a Hessian, and the transform of its inputs.
type FactorKey = (String, Option<HadamardWidth>);

/// The factor of a Hessian.
#[derive(Default)]
struct Factor {
    /// Tensors that still need it.
    users: usize,
    factor: Option<Arc<GptqFactor>>,
}

impl Hessians {
    /// Opens a directory of statistics.
    ///
    /// # Errors
    /// [`GivenError::Incomplete`] for an interrupted calibration, [`GivenError::Open`] without
    /// Hessians, and errors of reading.
    pub(crate) fn open(gptq: &Gptq) -> Result<Self> {
        let directory = &gptq.statistics;
        let index = calibration::index(directory)?;
        let inputs = index.get(INPUTS).and_then(|inputs| inputs.as_object());
        let inputs = inputs.into_iter().flatten();
        let inputs = inputs.filter_map(|(weight, input)| Some((weight.clone(), input.as_str()?.to_string())));
        let (mut files, mut file_of) = (Vec::new(), HashMap::new());
        for layer in 0.. {
            let path = directory.join(layer_file(layer));
            if !path.exists() {
                break;
            }
            let file = Checkpoint::open(&path)?;
            let names = file.tensors().map(|tensor| (tensor.name.to_string(), files.len()));
            file_of.extend(names.filter(|(name, _)| name.ends_with(&hessian("", None))));
            files.push(file);
        }
        if file_of.is_empty() {
            let why = "it has no Hessians; run microscale calibrate without --skip-hessians";
            let (what, file) = ("Hessians", directory.clone());
            return Err(Error::Given(GivenError::Open { what, file, source: why.into() }));
        }
        Ok(Self { gptq: gptq.clone(), files, file_of, inputs: inputs.collect(), factors: Mutex::default() })
    }

    /// Finds the Hessians of a tensor's inputs. `None` if the calibration did not see the tensor.
    ///
    /// # Errors
    /// [`GivenError::HessianShape`] for a Hessian of another number of columns.
    pub(crate) fn find(&self, tensor: &Tensor<'_>, recipe: &TensorRecipe) -> Result<Option<TensorHessians>> {
        let TensorRecipe { storage, hadamard, .. } = *recipe;
        let Some(input) = self.inputs.get(tensor.name) else { return Ok(None) };
        let single = hessian(input, None);
        let shape = storage.stored_shape(tensor.shape);
        let (rows, columns) = Tensor { shape: &shape, ..*tensor }.matrix();
        let experts = if shape.len() > 2 { shape[..shape.len() - 2].iter().product() } else { 1 };
        let known = |name: String| self.file_of.contains_key(&name).then_some(name);
        let names: Vec<_> = match experts {
            1 => vec![known(single)],
            count => (0..count).map(|expert| known(hessian(input, Some(expert)))).collect(),
        };
        if names.iter().all(Option::is_none) {
            return Ok(None);
        }
        for name in names.iter().flatten() {
            let found = self.stored(name);
            if found.is_none_or(|stored| stored.shape != [columns, columns] || stored.dtype != FileDtype::F32)
            {
                return Err(Error::Given(GivenError::HessianShape {
                    directory: self.gptq.statistics.clone(),
                    tensor: tensor.name.into(),
                    columns,
                }));
            }
            lock(&self.factors).entry((name.clone(), hadamard)).or_default().users += 1;
        }
        let rows_each = rows / names.len().max(1);
        Ok(Some(TensorHessians { names, rows_each, format: storage.format, hadamard }))
    }

    /// Returns the factor for rows of a tensor from `row` on; `None` for an expert without tokens.
    /// Factorizes the Hessian unless another tensor did.
    ///
    /// # Errors
    /// [`microscale::Error::Gptq`] for a Hessian without a factor.
    pub(crate) fn factor(
        &self,
        hessians: &TensorHessians,
        row: usize,
    ) -> microscale::Result<Option<Arc<GptqFactor>>> {
        let Some((name, stored)) = hessians.name(row).and_then(|name| Some((name, self.stored(name)?)))
        else {
            return Ok(None);
        };
        // Held while a factor is computed, so that it is computed once. It uses all threads.
        let mut factors = lock(&self.factors);
        let entry = factors.entry((name.into(), hessians.hadamard)).or_default();
        if let Some(factor) = &entry.factor {
            return Ok(Some(factor.clone()));
        }
        let mut entries = typed::<f32>(stored.data);
        let columns = stored.shape.first().copied().unwrap_or(0);
        if let Some(width) = hessians.hadamard {
            hadamard_hessian(entries.to_mut(), columns, width);
        }
        let factor = Arc::new(GptqFactor::new(&entries, columns, hessians.format, self.gptq.options)?);
        entry.factor = Some(factor.clone());
        Ok(Some(factor))
    }

    /// Drops the factors of a tensor that is done, unless others need them.
    pub(crate) fn release(&self, hessians: &TensorHessians) {
        let mut factors = lock(&self.factors);
        for name in hessians.names.iter().flatten() {
            if let Some(entry) = factors.get_mut(&(name.clone(), hessians.hadamard)) {
                entry.users = entry.users.saturating_sub(1);
                if entry.users == 0 {
                    entry.factor = None;
                }
            }
        }
    }

    fn stored(&self, name: &str) -> Option<Tensor<'_>> {
        self.files[*self.file_of.get(name)?].tensor(name)
    }
}
