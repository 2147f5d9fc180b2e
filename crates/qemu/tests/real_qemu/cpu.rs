//! Tests of the CPUs of the installed QEMU.

use std::fs::File;

use godwit_qemu::{
    Accelerator, Baseline, CpuFeatures, CpuModel, HostCpu, PsabiLevel, QemuInfo, Unfit,
    common_baseline, host_cpu, inspect,
};

use crate::bench::Bench;

/// Returns `None`, with the reason printed, where no QEMU is installed.
async fn translated() -> Option<(QemuInfo, HostCpu)> {
    match inspect("qemu-system-x86_64", None).await {
        Ok(qemu) => {
            let cpu = host_cpu(&qemu, Accelerator::Tcg, None).await.unwrap();
            Some((qemu, cpu))
        }
        Err(error) => {
            eprintln!("skipped: {}", error.fault());
            None
        }
    }
}

#[tokio::test]
async fn a_qemu_reports_its_models_and_features() {
    let Some((qemu, cpu)) = translated().await else { return };
    // TCG translates all of x86-64-v3 from 7.2 on, and no AVX-512 up to 10.x.
    assert_eq!(cpu.psabi_level(), Some(PsabiLevel::V3), "{:?}", cpu.features);
    assert!(
        !cpu.features.contains("invtsc") && !cpu.features.contains("sse3"),
        "{:?}",
        cpu.features
    );
    assert!(cpu.models["Westmere-v1"].is_empty(), "{:?}", cpu.models["Westmere-v1"]);
    assert_eq!(cpu.aliases["Haswell-noTSX-IBRS"], "Haswell-v4");
    // Each model that `-cpu help` lists is known.
    for model in &qemu.cpu_models {
        assert!(cpu.models.contains_key(model), "{model}");
    }
    // A definition is complete, even for models that cannot run here.
    assert!(cpu.definitions["Icelake-Server-v2"].contains("avx512f"));
    for (name, missing) in &cpu.models {
        let Some(definition) = cpu.definitions.get(name) else { continue };
        // A feature that depends on another missing feature is not listed beside it (QEMU 10.0:
        // `rdctl-no` without `arch-capabilities`), so the sets need not be equal. But either both
        // are empty or neither is.
        let lacking: CpuFeatures = definition.difference(&cpu.features).cloned().collect();
        assert_eq!(missing.is_empty(), lacking.is_empty(), "{name}: {missing:?} {lacking:?}");
    }
}

#[tokio::test]
async fn missing_features_keep_a_guest_from_starting() {
    let Some((_, cpu)) = translated().await else { return };
    let Some(bench) = Bench::new().await else { return };
    bench.disk();
    let model = "Westmere-v1,+avx512f,+aes";
    let unfit = cpu.runs(&CpuModel::parse(model)).unwrap_err();
    let Unfit::Missing { missing, .. } = unfit else { panic!("{unfit}") };
    assert_eq!(missing, ["avx512f".to_owned()].into());
    let error = bench
        .start("a", &bench.spec(|spec| spec.cpu_model = Some(model.into())))
        .await
        .unwrap_err();
    // Before that, it lists the features in the VM's log.
    assert!(error.to_string().contains("doesn't support requested features"), "{error}");
}

#[tokio::test]
async fn guests_start_with_baselines() {
    let Some((_, cpu)) = translated().await else { return };
    let Some(bench) = Bench::new().await else { return };
    bench.disk();
    let hosts = [("a", &cpu)];
    let common = common_baseline(&hosts).unwrap().baseline;
    let level = Baseline::named("x86-64-v3", &hosts).unwrap();
    for (side, baseline) in [("common", common), ("level", level)] {
        let model = &baseline.cpu_model;
        assert!(cpu.lacks_of(&baseline).is_empty(), "{model}");
        assert!(PsabiLevel::V3.features().is_subset(&baseline.features), "{model}");
        // QEMU starts only with all of its features.
        let spec = bench.spec(|spec| spec.cpu_model = Some(model.clone()));
        let vm = bench.start(side, &spec).await.unwrap_or_else(|error| panic!("{model}: {error}"));
        vm.quit().await;
    }
}

#[tokio::test]
async fn kvm_answers_where_it_can_be_opened() {
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        eprintln!("skipped: /dev/kvm: {error}");
        return;
    }
    let Some((qemu, _)) = translated().await else { return };
    let cpu = match host_cpu(&qemu, Accelerator::Kvm, None).await {
        Ok(cpu) => cpu,
        Err(error) => {
            // The device opens but is not KVM: that must be reported.
            eprintln!("skipped: {error}");
            return;
        }
    };
    assert!(cpu.features.contains("lm") && !cpu.features.contains("invtsc"), "{:?}", cpu.features);
    assert!(cpu.models["max"].is_empty());
}
