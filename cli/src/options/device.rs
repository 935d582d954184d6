//! Devices.

use microscale::{Device, DeviceChoice, Error};

use crate::streams::warn;

/// Makes a device ready. That there is no GPU is no news, but one that fails is, even where the CPU can do
/// the work.
pub(crate) fn device(choice: DeviceChoice) -> anyhow::Result<Device> {
    if choice != DeviceChoice::Auto {
        return Ok(Device::choose(choice)?);
    }
    let (device, refused) = Device::auto();
    if let Some(error @ Error::Gpu { .. }) = refused {
        warn(format_args!("warning: the CPU is used, because {error}"));
    }
    Ok(device)
}

/// [`device`] for operations that dequantize.
///
/// `auto` means the CPU: copying values back from a GPU takes longer than computing them.
pub(crate) fn device_to_dequantize(choice: DeviceChoice) -> anyhow::Result<Device> {
    if choice == DeviceChoice::Auto { Ok(Device::Cpu) } else { device(choice) }
}
