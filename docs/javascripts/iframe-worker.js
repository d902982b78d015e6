// A page that is opened from disk may start no worker, and the search of the site runs in one. In a worker's place its
// script runs in a hidden frame, which has globals of its own. The search asks by the name `IFrameWorker` where it is.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow, page = this.frame.contentDocument;
      page.open(); // so that the browser puts no empty page of its own there later
      page.write("<!doctype html><body>");
      page.close();
      const load = (one) => new Promise((done, failed) => {
        const script = page.createElement("script");
        script.src = new URL(one, document.baseURI).href;
        script.onload = done;
        script.onerror = () => failed(new Error(`${script.src} can't be loaded`));
        page.body.append(script);
      });
      inside.postMessage = (data) => setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })));
      inside.importScripts = (...all) => all.reduce((before, one) => before.then(() => load(one)), Promise.resolve());
      this.loaded = load(url);
      this.loaded.catch((error) => this.dispatchEvent(new ErrorEvent("error", { error, message: error.message })));
    }

    postMessage(data) {
      const inside = this.frame.contentWindow;
      this.loaded.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  }
  window.IFrameWorker = window.Worker = IFrameWorker;
}
